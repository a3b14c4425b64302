"""The mean loss of some batches as a function of the weights, of a model that is left as it was.

What BatchNorm normalises with is a policy, which every result states:

- "eval": the running statistics, as they are. What a user of the network gets.
- "recalibrated": statistics of these batches at the weights where the loss is asked for, averaged
  over the batches and then fixed; derivatives take them for constants.
- "batch": the statistics of each batch, as in training; derivatives go through them.

All other layers, dropout among them, are as in evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import reduce
from math import isfinite
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from saltflat.core.batchnorm import running_layers
from saltflat.core.perturb import displaced
from saltflat.sharpness._unchanged import exact_float32, kept

Policy = Literal["eval", "recalibrated", "batch"]
Batches = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


class Objective:
    """The loss, its gradient and products with its Hessian; weights are one long vector.

    Whatever is random in the model is drawn alike in every pass, so that differences between
    passes are differences between weights.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, batches: Batches, batchnorm: Policy
    ) -> None:
        if isinstance(batches, Iterator):
            raise ValueError(
                f"batches are gone through again and again, got a {type(batches).__name__}: pass "
                "a list"
            )
        if batchnorm not in get_args(Policy):
            known = ", ".join(get_args(Policy))
            raise ValueError(f"unknown batchnorm {batchnorm!r}: it is one of {known}")
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter of the model requires a gradient: there is no direction")
        self.model = getattr(model, "_orig_mod", model)  # torch.compile has no second derivatives
        self.loss_fn, self.batches, self.batchnorm = loss_fn, batches, batchnorm
        self.device = self.parameters[0].device
        self.gpus = list({p.device for p in self.parameters if p.device.type == "cuda"})
        kinds = {p.dtype for p in self.parameters}
        self.dtype = reduce(torch.promote_types, kinds, torch.float32)
        self.size = sum(p.numel() for p in self.parameters)
        self._sizes = [p.numel() for p in self.parameters]
        self._rows: Counter[str] = Counter()
        self._hvps = 0
        self.images = 0
        """In all the batches; known after the first pass."""

    def on(self, batches: Batches) -> Objective:
        """The loss of other batches, whose passes count as passes over part of these."""
        other = Objective(self.model, self.loss_fn, batches, self.batchnorm)
        other._rows = self._rows
        return other

    @contextmanager
    def at(self, offset: Tensor | None = None) -> Iterator[None]:
        """While entered, the weights are moved by the offset."""
        moved = displaced(self.parameters, self._parts(offset)) if offset is not None else None
        with moved or nullcontext():
            if self.batchnorm == "recalibrated":
                self._recalibrate()
            yield

    @torch.no_grad()
    def loss(self) -> float:
        """The mean over all rows."""
        return _mean([(self._loss(x, y), len(x)) for x, y in self.visit("forward")])

    def loss_and_gradient(self) -> tuple[float, Tensor]:
        """The same, and its gradient."""
        losses, total = [], self._zeros()
        for x, y in self.visit("forward", "backward"):
            with torch.enable_grad():
                loss = self._loss(x, y)
                parts = torch.autograd.grad(
                    loss * len(x), self.parameters, allow_unused=True, materialize_grads=True
                )
            total += self._flat(parts)
            losses.append((loss.detach(), len(x)))
        return _mean(losses), total / self.images

    def products(self, vectors: Tensor) -> Tensor:
        """The Hessian times each row; the pass that all of them share is made once."""
        total = torch.zeros_like(vectors)
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            for x, y in self.visit("forward", "backward"):
                with torch.enable_grad():
                    loss = self._loss(x, y) * len(x)
                    gradients = torch.autograd.grad(
                        loss, self.parameters, create_graph=True, allow_unused=True
                    )
                    for number, vector in enumerate(vectors):
                        more = number + 1 < len(vectors)
                        total[number] += self._product(gradients, vector, more)
        self._hvps += len(vectors)
        return total / self.images

    def facts(self) -> dict[str, Any]:
        """What a result says beside its value."""
        passes = {kind: self._rows[kind] / self.images for kind in ("forward", "backward")}
        return {"batchnorm": self.batchnorm, "images": self.images, **passes, "hvps": self._hvps}

    def _product(self, gradients: tuple[Tensor | None, ...], vector: Tensor, more: bool) -> Tensor:
        pairs = zip(gradients, self._parts(vector), strict=True)
        # A gradient that depends on no weight has no derivative; torch would refuse it.
        used = [(g, part) for g, part in pairs if g is not None and g.requires_grad]
        if not used:
            return self._zeros()
        outputs, weights = zip(*used, strict=True)
        return self._flat(
            torch.autograd.grad(
                outputs,
                self.parameters,
                weights,
                retain_graph=more,
                allow_unused=True,
                materialize_grads=True,
            )
        )

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x), y)
        if loss.dim() > 0:
            raise ValueError(
                f"loss_fn must give the mean loss of a batch, got shape {tuple(loss.shape)}"
            )
        return loss

    def visit(self, *kinds: str) -> Iterator[tuple[Tensor, Tensor]]:
        """All the batches, counted, with the random numbers of every other pass."""
        torch.default_generator.manual_seed(0)
        for gpu in self.gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(0)
        rows = 0
        for x, y in self.batches:
            rows += len(x)
            yield x, y
        if not rows:
            raise ValueError("there are no batches: pass a list of at least one (inputs, labels)")
        self.images = rows
        self._rows.update(dict.fromkeys(kinds, rows))

    @torch.no_grad()
    def _recalibrate(self) -> None:
        layers = running_layers(self.model)
        for layer in layers:
            if not isinstance(layer, nn.modules.batchnorm._NormBase):
                raise ValueError(
                    f"{type(layer).__name__} keeps statistics of its own, which cannot be "
                    "recalibrated: choose eval or batch"
                )
            layer.reset_running_stats()
        momenta = [layer.momentum for layer in layers]
        seen = 0
        try:
            for layer in layers:
                layer.training = True
            for x, _ in self.visit("forward"):
                seen += len(x)
                for layer in layers:
                    layer.momentum = len(x) / seen  # the mean over all rows, in the end
                self.model(x)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.training, layer.momentum = False, momentum

    def _zeros(self) -> Tensor:
        return torch.zeros(self.size, device=self.device, dtype=self.dtype)

    def _flat(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1).to(self.device, self.dtype) for part in parts])

    def _parts(self, vector: Tensor) -> list[Tensor]:
        parts = zip(vector.split(self._sizes), self.parameters, strict=True)
        return [part.view(p.shape).to(p.device, p.dtype) for part, p in parts]

    def weights(self) -> Tensor:
        """A copy of the weights."""
        return self._flat(p.detach() for p in self.parameters).clone()


@contextmanager
def objective(
    model: nn.Module, loss_fn: Loss, batches: Batches, batchnorm: Policy
) -> Iterator[Objective]:
    """While entered, the model is as the policy has it; then as it was, also after an error.

    Raises:
        ValueError: If the batches can be gone through once only, the policy is unknown, or no
            parameter requires a gradient.
    """
    made = Objective(model, loss_fn, batches, batchnorm)
    with ExitStack() as stack:
        stack.enter_context(kept(model))
        stack.enter_context(torch.random.fork_rng(made.gpus))
        stack.enter_context(exact_float32())
        stack.enter_context(torch.autocast(made.device.type, enabled=False))
        model.eval()
        if batchnorm == "batch":
            for layer in running_layers(model):
                layer.training = True  # itself, not what is inside
        yield made


def _mean(losses: list[tuple[Tensor, int]]) -> float:
    """Over all rows, of the batches' means and sizes; this waits for the device, once."""
    means, rows = zip(*losses, strict=True)
    values = torch.stack(means).tolist()
    return sum(value * count for value, count in zip(values, rows, strict=True)) / sum(rows)


def check_rho(rho: float) -> None:
    """A radius is a number, 0 or more."""
    if not (rho >= 0 and isfinite(rho)):
        raise ValueError(f"rho must be 0 or more, got {rho}")


def check_at_least(least: int, **numbers: int) -> None:
    """So many steps, draws and the like there must be."""
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
