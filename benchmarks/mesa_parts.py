"""Why MESA gains or loses: what its teacher is made of, how hard it pulls, and from what.

A model is trained with each setting. After some epochs, on the same training images:

- the share of the random initialisation in the teacher, which is the product of the decays;
- the accuracy of the model and of its teacher, and of the teacher with BatchNorm statistics of its
  own, estimated anew from training images, instead of the average of the model's;
- the norm of the term's gradient, as a share of the cross-entropy's, and the cosine between them;
- the trajectory loss (temperature 5, squared) to a teacher that sees the model's images, or these
  augmented anew;
- how far the outputs of the model, in training, and of its teacher spread over the classes (the
  standard deviation), and the norm of the model's weights.

    python benchmarks/mesa_parts.py
    python benchmarks/mesa_parts.py "cifar10_small epochs=400 method=mesa method.decay=0.9937" \
        --data cifar10.npz --at 40 80 120 160 200 \
        --settings "next to no pull" "0.3, another view" "0.3, another view, rescaled"

The run is one of accuracy.py's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import record
import torch
from lines import config_of, folder_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from saltflat import MESA, trajectory_loss
from saltflat.train import Config, MethodConfig
from saltflat.train.augment import Batch, TrainLoader
from saltflat.train.data import Data, load_data
from saltflat.train.evaluate import TestSet, accuracies
from saltflat.train.fast import build_steps, own_stream
from saltflat.train.ranks import device_of
from saltflat.train.state import State, build

SETTINGS: dict[str, dict[str, Any]] = {
    "released code: 0.8, T = 5, T^2, no warm-up": {"warmup": False},
    "equations: 0.8, T = 5, no warm-up": {"tau_squared": False, "warmup": False},
    "0.8, T = 5, T^2": {},
    "0.8, T = 5": {"tau_squared": False},
    "1, T = 1": {"weight": 1.0, "temperature": 1.0},
}
_VIEW = {"weight": 0.3, "another_view": True}
SPREADS: dict[str, dict[str, Any]] = {
    "next to no pull": {"weight": 1e-6},
    "0.3, another view": _VIEW,
    "0.3, another view, rescaled": {**_VIEW, "rescale": True},
}


def measure(config: Config, name: str, data: Data, at: list[int]) -> list[dict[str, Any]]:
    device = device_of(config)
    loader = TrainLoader(data, config.data, config.seed)
    torch.manual_seed(config.seed)
    state, _ = build(config, data, len(loader))
    tests = TestSet(config, data, device)
    rows = []
    with own_stream(device):
        steps = build_steps(config, state, data, loader, device)
        for epoch in range(max(at)):
            state.training.set_epoch(epoch)
            state.model.train()
            for _ in steps(epoch, 0):
                state.schedule.step()
            if epoch + 1 in at:
                found = parts(config, state, loader, tests)
                rows.append({"setting": name, "epochs": epoch + 1, **found})
                print(rows[-1], flush=True)
    return rows


def parts(config: Config, state: State, loader: TrainLoader, tests: TestSet) -> dict[str, Any]:
    mesa = state.training.term
    assert isinstance(mesa, MESA)
    device = device_of(config)
    batches = [
        Batch(*(None if part is None else part.to(device) for part in batch))  # type: ignore
        for batch in islice(loader.batches(0, views=True), 20)
    ]
    own = recalibrated(mesa.teacher.module, [batch.images for batch in batches])
    models = {"model": state.model, "teacher": mesa.teacher, "own statistics": own}
    found = accuracies(config, tests, models, device)
    loss, term = gradients(state.model, mesa, batches, state.training.another_view)
    shown = {
        "initialisation": f"{initialisation(mesa):.1%}",
        **{name: f"{share:.2f}" for name, share in found.items()},
        "gradient": f"{float(term.norm() / loss.norm()):.2f}",
        "cosine": f"{float(torch.dot(term, loss) / (term.norm() * loss.norm())):.2f}",
    }
    random = config.data.augment != "none"
    seen = {"same view": False} | ({"another view": True} if random else {})
    for view, another in seen.items():
        shown[view] = f"{divergence(state.model, mesa.teacher, batches, another):.4f}"
    trained = copy.deepcopy(state.model).train()
    shown["model's spread"] = f"{spread(trained, batches):.2f}"
    shown["teacher's spread"] = f"{spread(mesa.teacher, batches):.2f}"
    weights = torch.cat([weight.detach().flatten() for weight in state.model.parameters()])
    shown["weights"] = f"{float(weights.norm()):.1f}"
    return shown


def initialisation(mesa: MESA) -> float:
    """The share of the first weights in the teacher's, after its updates."""
    teacher, share = mesa.teacher, 1.0
    for t in range(teacher.updates):
        share *= min(teacher.decay, (1 + t) / (10 + t)) if teacher.warmup else teacher.decay
    return share


@torch.no_grad()
def recalibrated(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """A copy whose BatchNorm statistics are the means over some batches of its own activations."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the plain mean
    model.train()
    for x in batches:
        model(x)
    return model.eval()


@torch.no_grad()
def divergence(
    model: nn.Module, teacher: Callable[[Tensor], Tensor], batches: list[Batch], another: bool
) -> float:
    """The trajectory loss of the model in training; its statistics stay."""
    model = copy.deepcopy(model).train()
    return fmean(
        float(trajectory_loss(model(batch.images), teacher(seen_of(batch, another))))
        for batch in batches
    )


@torch.no_grad()
def spread(model: nn.Module, batches: list[Batch]) -> float:
    return fmean(float(model(batch.images).float().std(-1).mean()) for batch in batches)


def gradients(
    model: nn.Module, mesa: MESA, batches: list[Batch], another: bool
) -> tuple[Tensor, Tensor]:
    """Of the cross-entropy and of the term, over some batches; the model's statistics stay."""
    model = copy.deepcopy(model).train()
    weights = list(model.parameters())
    sums = torch.zeros(2, sum(weight.numel() for weight in weights), device=weights[0].device)
    for batch in batches:
        logits = model(batch.images)
        losses = cross_entropy(logits, batch.labels), mesa(logits, seen_of(batch, another))
        for total, one in zip(sums, losses, strict=True):
            found = torch.autograd.grad(one, weights, retain_graph=True)
            total += torch.cat([gradient.flatten() for gradient in found])
    loss, term = sums
    return loss, term


def seen_of(batch: Batch, another: bool) -> Tensor:
    assert batch.view is not None
    return batch.view if another else batch.images


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = "digits_noisy data.label_noise=0.0 method=mesa"
    parser.add_argument("run", nargs="?", default=usual)
    parser.add_argument("--data", help="An .npz of the recipe's data, instead of a download.")
    parser.add_argument("--at", type=int, nargs="+", default=[6, 10, 20, 40])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    config = config_of(args.run, 0, args.data)
    data = load_data(config.data)
    rows = []
    for name in args.settings:
        chosen = {**SETTINGS, **SPREADS}[name]
        plain = {"average_std": False, "rescale": False}
        settings = {**config.method.settings, **plain, **chosen}
        one = dataclasses.replace(config, method=MethodConfig("mesa", settings))
        rows += measure(one, name, data, args.at)
    theme, heading = f"mesa_parts_{folder_of(args.run)}", f"`{args.run}`, one seed:"
    record.write(theme, "MESA's parts", {heading: rows}, args.out)
