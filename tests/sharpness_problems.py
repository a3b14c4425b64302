"""What the tests of sharpness share: every measure, and problems with known answers."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from problems import dataset, network
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat.sharpness import (
    adaptive_sharpness,
    average_sharpness,
    hessian_trace,
    m_sharpness,
    max_sharpness,
    sam_sharpness,
    spectral_density,
    top_eigenvalues,
)

MEASURES = {
    "sam": sam_sharpness,
    "max": partial(max_sharpness, steps=3),
    "m": partial(m_sharpness, m=6),
    "adaptive": partial(adaptive_sharpness, steps=3),
    "average": partial(average_sharpness, draws=3),
    "eigenvalues": partial(top_eigenvalues, iterations=4),
    "trace": partial(hessian_trace, hvps=6),
    "spectrum": partial(spectral_density, draws=2, iterations=3),
}
POLICIES = ["eval", "recalibrated", "batch"]


def parts(x, y, *sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def quadratic(seed=0, rows=10, features=4):
    """A linear model with mse: its batches, gradient and Hessian at the weights, in float64."""
    torch.manual_seed(seed)
    x, y = torch.randn(rows, features).double(), torch.randn(rows, 1).double()
    model = nn.Linear(features, 1, bias=False).double()
    w = model.weight.detach().T
    g, hessian = 2 / rows * x.T @ (x @ w - y), 2 / rows * x.T @ x
    return model, parts(x, y, rows // 2, 1, rows - rows // 2 - 1), g[:, 0], hessian


def linear(seed=0):
    """A linear classifier, its twin's weights, and data, in float64."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 4).double()
    twin = {"matrix": model.weight.detach().numpy().T.copy(), "bias": model.bias.detach().numpy()}
    x, y = dataset(seed).tensors
    return model, twin, x.double(), y


def used_network():
    """A network with running statistics of its own, gradients, and flags of both kinds."""
    model = nn.Sequential(network(), nn.Dropout(0.5))
    x, y = dataset().tensors
    for _ in range(5):
        cross_entropy(model(3 * x + 1), y).backward()
    model[0][0].bias.requires_grad_(False)
    model[0][3].bias.grad = None
    model[0].eval()
    model[0][1].train()
    return model


def matrix_of(values, seed=0):
    """A symmetric matrix of these eigenvalues, its products, and random vectors."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(len(values),) * 2))
    matrix = torch.from_numpy(turn * np.asarray(values) @ turn.T)
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, len(values), generator=generator, dtype=torch.float64)
    return matrix, lambda rows: rows @ matrix, draw


def signs_of(size, seed):
    generator = torch.Generator().manual_seed(seed)

    def signs(rows):
        return 2.0 * torch.randint(2, (rows, size), generator=generator).double() - 1

    return signs
