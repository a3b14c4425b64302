"""The paper's equations, slowly, in float64 numpy and plain loops: what the library is held to.

Nothing here imports saltflat or differentiates automatically. The model is a linear classifier, so
that every gradient is a line of algebra.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max())
    return e / e.sum()


def kl(reference: Array, logits: Array, temperature: float) -> float:
    """KL(softmax(reference / T) || softmax(logits / T)) of one row, as a sum over classes."""
    p, q = softmax(reference / temperature), softmax(logits / temperature)
    return float(sum(pc * np.log(pc / qc) for pc, qc in zip(p, q, strict=True)))


def kl_gradient(reference: Array, logits: Array, temperature: float) -> Array:
    """Its derivative by the logits."""
    return (softmax(logits / temperature) - softmax(reference / temperature)) / temperature


class LinearClassifier:
    """f(x) = x W under mean cross-entropy, trained by Algorithm 1 with plain SGD."""

    def __init__(self, weight: Array, learning_rate: float) -> None:
        self.weight = weight.copy()
        self.learning_rate = learning_rate

    def step(
        self,
        x: Array,
        y: NDArray[np.int64],
        references: list[Array | None],
        strength: float,
        temperature: float,
    ) -> float:
        """One step on cross-entropy + strength * KL over the rows with a reference / all rows."""
        logits = x @ self.weight
        loss, pulls = 0.0, np.zeros_like(logits)
        for i, (z, label, reference) in enumerate(zip(logits, y, references, strict=True)):
            q = softmax(z)
            loss -= np.log(q[label]) / len(x)
            pulls[i] += (q - np.eye(len(z))[label]) / len(x)
            if reference is not None:
                loss += strength * kl(reference, z, temperature) / len(x)
                pulls[i] += strength * kl_gradient(reference, z, temperature) / len(x)
        self.weight -= self.learning_rate * x.T @ pulls
        return float(loss)


def saf_training(
    weight: Array,
    batches: list[list[tuple[NDArray[np.int64], Array, NDArray[np.int64]]]],
    *,
    learning_rate: float,
    strength: float,
    temperature: float,
    lag: int,
    start_epoch: int,
) -> list[tuple[float, Array]]:
    """Algorithm 1 with SAF: all outputs of all epochs are kept, by epoch and sample."""
    model, outputs, trace = LinearClassifier(weight, learning_rate), {}, []
    for epoch, epoch_batches in enumerate(batches):
        for index, x, y in epoch_batches:
            for i, row in zip(index, x @ model.weight, strict=True):
                outputs[epoch, i] = row
            references = [
                outputs.get((epoch - lag, i)) if epoch >= start_epoch else None for i in index
            ]
            loss = model.step(x, y, references, strength, temperature)
            trace.append((loss, model.weight.copy()))
    return trace


def mesa_training(
    weight: Array,
    batches: list[list[tuple[NDArray[np.int64], Array, NDArray[np.int64]]]],
    *,
    learning_rate: float,
    strength: float,
    temperature: float,
    decay: float,
    start_epoch: int,
    freeze_epoch: int | None,
) -> list[tuple[float, Array, Array]]:
    """Algorithm 1 with MESA: v_1 = theta_1, and v_t is averaged before the loss of step t.

    It is not averaged after a step of `freeze_epoch` or later.
    """
    model, trace = LinearClassifier(weight, learning_rate), []
    teacher, frozen = weight.copy(), False
    for epoch, epoch_batches in enumerate(batches):
        for _, x, y in epoch_batches:
            if not frozen:
                teacher = decay * teacher + (1 - decay) * model.weight
            frozen = freeze_epoch is not None and epoch >= freeze_epoch
            references = [row if epoch >= start_epoch else None for row in x @ teacher]
            loss = model.step(x, y, references, strength, temperature)
            trace.append((loss, model.weight.copy(), teacher.copy()))
    return trace


class RingModel:
    """What a ring of `lag + 1` slots with stamps holds, as a dictionary."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.cells: dict[tuple[int, int], tuple[int, Array]] = {}

    def swap(self, epoch: int, index: list[int], rows: Array) -> list[Array | None]:
        """References of a batch, after which its samples' first outputs of the epoch are kept."""
        slots = self.lag + 1
        found = [self.cells.get(((epoch - self.lag) % slots, i)) for i in index]
        for i, row in zip(index, rows, strict=True):
            if self.cells.get((epoch % slots, i), (None,))[0] != epoch:
                self.cells[epoch % slots, i] = (epoch, row)
        return [cell[1] if cell and cell[0] == epoch - self.lag else None for cell in found]


# The SAM family, on a linear classifier with a bias, under SGD with momentum and weight decay.

Weights = dict[str, Array]


def linear_gradient(weights: Weights, x: Array, y: NDArray[np.int64]) -> tuple[Array, Weights]:
    """The loss of each row, and the gradient of their mean."""
    losses, pulls = np.zeros(len(x)), np.zeros((len(x), weights["bias"].size))
    for i, (z, label) in enumerate(zip(x @ weights["matrix"] + weights["bias"], y, strict=True)):
        q = softmax(z)
        losses[i] = -np.log(q[label])
        pulls[i] = (q - np.eye(len(z))[label]) / len(x)
    return losses, {"matrix": x.T @ pulls, "bias": pulls.sum(0)}


def inner_product(a: Weights, b: Weights) -> float:
    return float(sum((a[k] * b[k]).sum() for k in a))


def length(a: Weights) -> float:
    return float(np.sqrt(inner_product(a, a)))


def plus(a: Weights, b: Weights, scale: float = 1.0) -> Weights:
    return {k: a[k] + scale * b[k] for k in a}


class MomentumSGD:
    """v = mu v + (g + wd w); w = w - lr v."""

    def __init__(self, weights: Weights, momentum: float, weight_decay: float) -> None:
        self.weights = {k: w.copy() for k, w in weights.items()}
        self.velocity: Weights | None = None
        self.momentum, self.weight_decay = momentum, weight_decay

    def step(self, gradient: Weights, lr: float) -> None:
        decayed = plus(gradient, self.weights, self.weight_decay)
        if self.velocity is None:
            self.velocity = decayed
        else:
            self.velocity = plus(decayed, self.velocity, self.momentum)
        self.weights = plus(self.weights, self.velocity, -lr)


def ascent(gradient: Weights, rho: float) -> Weights:
    """rho g / (|g| + 1e-12)."""
    return {k: rho * g / (length(gradient) + 1e-12) for k, g in gradient.items()}


def adaptive_ascent(weights: Weights, gradient: Weights, rho: float, eta: float) -> Weights:
    """rho T^2 g / |T g| with T = |w| + eta on the matrix and 1 on the bias."""
    t = {"matrix": np.abs(weights["matrix"]) + eta, "bias": np.ones_like(weights["bias"])}
    scaled = {k: t[k] * gradient[k] for k in gradient}
    return {k: rho * t[k] * scaled[k] / (length(scaled) + 1e-12) for k in gradient}


def sam_family_step(
    name: str,
    sgd: MomentumSGD,
    x: Array,
    y: NDArray[np.int64],
    *,
    lr: float,
    step: int,
    memory: dict[str, Weights],
    rho: float,
    joining: set[str] | None = None,
    **settings: float,
) -> None:
    """One step of a method, as its paper has it; `memory` is what it keeps between steps."""
    w = sgd.weights

    def at(offset: Weights, rows: Array | slice = slice(None)) -> tuple[Array, Weights]:
        return linear_gradient(plus(w, offset), x[rows], y[rows])

    losses, g = linear_gradient(w, x, y)
    if name == "sam":
        final = at(ascent(g, rho))[1]
    elif name == "asam":
        final = at(adaptive_ascent(w, g, rho, settings["eta"]))[1]
    elif name == "gsam":
        share = (lr - settings["lr_min"]) / (settings["lr_max"] - settings["lr_min"])
        rho_t = settings["rho_min"] + (rho - settings["rho_min"]) * min(max(share, 0), 1)
        g_adv = at(ascent(g, rho_t))[1]
        g_parallel = {k: inner_product(g, g_adv) / length(g_adv) ** 2 * v for k, v in g_adv.items()}
        final = plus(g_adv, plus(g, g_parallel, -1), -settings["alpha"])
    elif name == "esam":
        assert joining is not None
        part = {k: v if k in joining else 0 * v for k, v in g.items()}
        offset = {k: v / settings["beta"] for k, v in ascent(part, rho).items()}
        rise = at(offset)[0] - losses
        count = int(np.ceil(settings["gamma"] * len(x)))
        rows = np.sort(np.argsort(-rise, kind="stable")[:count])
        final = at(offset, rows)[1]
    elif name == "looksam":
        if step % settings["interval"] == 0:
            final = at(ascent(g, rho))[1]
            memory["g_v"] = plus(final, g, -inner_product(final, g) / length(g) ** 2)
        else:
            g_v = memory["g_v"]
            final = plus(g, g_v, settings["alpha"] * length(g) / length(g_v))
    elif name == "msam":
        if sgd.velocity is None:
            final = g
        elif settings["adaptive"]:
            final = at(adaptive_ascent(w, sgd.velocity, -rho, settings["eta"]))[1]
        else:
            final = at(ascent(sgd.velocity, -rho))[1]
    else:
        raise ValueError(name)
    sgd.step(final, lr)


def climbing_losses(
    weights: Weights, x: Array, y: NDArray[np.int64], rho: float, steps: int, scaled: bool
) -> list[float]:
    """The mean losses at the weights and after each step of length rho uphill, each followed by
    a way back into the ball of radius rho; lengths are of offset / |weight| where scaled."""
    scales = {k: np.abs(w) if scaled else np.ones_like(w) for k, w in weights.items()}
    place = {k: np.zeros_like(w) for k, w in weights.items()}
    losses = []
    for step in range(steps + 1):
        moved = {k: w + scales[k] * place[k] for k, w in weights.items()}
        rows, g = linear_gradient(moved, x, y)
        losses.append(float(rows.mean()))
        if step < steps:
            place = plus(place, ascent({k: scales[k] * v for k, v in g.items()}, rho))
            if length(place) > rho:
                place = {k: v * rho / length(place) for k, v in place.items()}
    return losses


def linear_hessian(weights: Weights, x: Array) -> Array:
    """The second derivatives of the mean cross-entropy by the matrix, class after class, and the
    bias: for each row of x, (x, 1) (x, 1)^T times diag(p) - p p^T."""
    features, classes = weights["matrix"].shape
    total = np.zeros((classes * (features + 1),) * 2)
    for row in x:
        p = softmax(row @ weights["matrix"] + weights["bias"])
        spread = np.diag(p) - np.outer(p, p)
        one = np.kron(spread, np.outer(row, row))
        mixed = np.kron(spread, row[:, None])
        total += np.block([[one, mixed], [mixed.T, spread]]) / len(x)
    return total
