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
        """One step on cross-entropy + strength * mean KL over the rows that have a reference."""
        logits = x @ self.weight
        count = max(sum(r is not None for r in references), 1)
        loss, pulls = 0.0, np.zeros_like(logits)
        for i, (z, label, reference) in enumerate(zip(logits, y, references, strict=True)):
            q = softmax(z)
            loss -= np.log(q[label]) / len(x)
            pulls[i] += (q - np.eye(len(z))[label]) / len(x)
            if reference is not None:
                loss += strength * kl(reference, z, temperature) / count
                pulls[i] += strength * kl_gradient(reference, z, temperature) / count
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
) -> list[tuple[float, Array, Array]]:
    """Algorithm 1 with MESA: v_1 = theta_1, and v_t is averaged before the loss of step t."""
    model, trace = LinearClassifier(weight, learning_rate), []
    teacher = weight.copy()
    for epoch, epoch_batches in enumerate(batches):
        for _, x, y in epoch_batches:
            teacher = decay * teacher + (1 - decay) * model.weight
            references = [row if epoch >= start_epoch else None for row in x @ teacher]
            loss = model.step(x, y, references, strength, temperature)
            trace.append((loss, model.weight.copy(), teacher.copy()))
    return trace


class RingModel:
    """What a ring of `lag` slots with stamps holds, as a dictionary."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.cells: dict[tuple[int, int], tuple[int, Array]] = {}

    def swap(self, epoch: int, index: list[int], rows: Array) -> list[Array | None]:
        """References of a batch, after which its own outputs take their place."""
        found = [self.cells.get((epoch % self.lag, i)) for i in index]
        for i, row in zip(index, rows, strict=True):
            self.cells[epoch % self.lag, i] = (epoch, row)
        return [cell[1] if cell and cell[0] == epoch - self.lag else None for cell in found]
