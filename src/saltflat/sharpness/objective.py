"""The mean loss of fixed batches as a function of a model's weights.

The model is left as it was. A policy says what BatchNorm normalises with; every result names it:

- "eval": the running statistics, as they are. This is the deployed function.
- "recalibrated": statistics of these batches at the weights where the loss is evaluated, averaged
  over the batches and then fixed. Derivatives treat them as constants.
- "batch": the statistics of each batch, as in training. Derivatives go through them.

All other layers, dropout among them, run in evaluation mode.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from saltflat.core.batchnorm import running_layers
from saltflat.core.perturb import displaced

Policy = Literal["eval", "recalibrated", "batch"]
Batches = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def rows_of(x: Any, y: Any) -> int:
    """The rows of a batch: the length of its labels, or of the first tensor in its inputs."""
    tensors = [leaf for leaf in tree_leaves((y, x)) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0] if tensors else x)


class Objective:
    """The loss, its gradient and its Hessian's products; all weights form one long vector.

    Every pass sees the same batches and the same random numbers. A difference between passes is
    therefore a difference between weights.
    """

    batches: list[tuple[Tensor, Tensor]]

    def __init__(self, model: nn.Module, loss_fn: Loss, batchnorm: Policy) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(
                f"model has no parameter that requires a gradient, got {type(model).__name__}"
            )
        self.model = getattr(model, "_orig_mod", model)  # torch.compile has no second derivatives
        self.loss_fn, self.batchnorm = loss_fn, batchnorm
        self.device = self.parameters[0].device
        self.gpus = list({p.device for p in self.parameters if p.device.type == "cuda"})
        dtypes = {p.dtype for p in self.parameters}
        self.dtype = reduce(torch.promote_types, dtypes, torch.float32)
        self._sizes = [p.numel() for p in self.parameters]
        self.size = sum(self._sizes)
        self._rows: Counter[str] = Counter()
        self._hvps = 0

    def draw(self, batches: Batches) -> None:
        """Go through the batches once and keep them: a loader may shuffle each time."""
        self._seed()
        self.batches = []
        for batch in batches:
            pair = isinstance(batch, tuple | list) and len(batch) == 2
            if not pair or not hasattr(batch[0], "__len__"):
                raise ValueError(f"batches must hold pairs (inputs, labels), got {batch!r:.80}")
            self.batches.append((batch[0], batch[1]))
        if not all(rows_of(x, y) for x, y in self.batches) or not self.batches:
            raise ValueError(f"batches must hold rows, got {self.batches!r:.80}")

    @property
    def images(self) -> int:
        """Rows of all batches."""
        return sum(rows_of(x, y) for x, y in self.batches)

    def of_group(self, x: Tensor, y: Tensor) -> Objective:
        """The loss of some of the rows; its passes count as passes over part of the images."""
        group = copy.copy(self)
        group.batches = [(x, y)]
        return group

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
        return self._mean([self._loss(x, y) for x, y in self._pass("forward")])

    def loss_and_gradient(self) -> tuple[float, Tensor]:
        """The mean over all rows, and its gradient."""
        losses, total = [], torch.zeros(self.size, device=self.device, dtype=self.dtype)
        for x, y in self._pass("forward", "backward"):
            with torch.enable_grad():
                loss = self._loss(x, y)
                total += self._gradient(loss * rows_of(x, y))
            losses.append(loss.detach())
        return self._mean(losses), total / self.images

    def products(self, vectors: Tensor) -> Tensor:
        """The Hessian times each row. All rows share one forward and one first backward pass."""
        total = torch.zeros_like(vectors)
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            for x, y in self._pass("forward", "backward"):
                with torch.enable_grad():
                    loss = self._loss(x, y) * rows_of(x, y)
                    gradients = torch.autograd.grad(
                        loss, self.parameters, create_graph=True, allow_unused=True
                    )
                    for i, vector in enumerate(vectors):
                        more = i + 1 < len(vectors)
                        total[i] += self._product(gradients, vector, retain_graph=more)
        self._hvps += len(vectors)
        return total / self.images

    def facts(self) -> dict[str, Any]:
        """The fields of `Measured`, which every result has beside its value."""
        passes = {kind: self._rows[kind] / self.images for kind in ("forward", "backward")}
        return {"batchnorm": self.batchnorm, "images": self.images, **passes, "hvps": self._hvps}

    def normal(self, seed: int) -> Callable[[], Tensor]:
        """Draws vectors of uniform random direction, the same on every device."""
        generator = torch.Generator().manual_seed(int(seed))
        draw = partial(torch.randn, self.size, generator=generator, dtype=self.dtype)
        return lambda: draw().to(self.device)

    def signs(self, seed: int) -> Callable[[int], Tensor]:
        """Draws rows of random signs, the same on every device."""
        generator = torch.Generator().manual_seed(int(seed))
        bits = partial(torch.randint, 2, generator=generator, dtype=torch.int8)
        return lambda rows: (2 * bits((rows, self.size)) - 1).to(self.device, self.dtype)

    def weights(self) -> Tensor:
        """A copy of the weights."""
        return self._flat(p.detach() for p in self.parameters).clone()

    def _product(
        self, gradients: Iterable[Tensor | None], vector: Tensor, retain_graph: bool
    ) -> Tensor:
        pairs = zip(gradients, self._parts(vector), strict=True)
        # torch refuses a gradient that depends on no weight; its derivative is 0.
        used = [(g, part) for g, part in pairs if g is not None and g.requires_grad]
        if not used:
            return torch.zeros_like(vector)
        outputs, parts = zip(*used, strict=True)
        return self._gradient(outputs, parts, retain_graph)

    def _gradient(self, outputs: Any, factors: Any = None, retain_graph: bool = False) -> Tensor:
        options = {"retain_graph": retain_graph, "allow_unused": True, "materialize_grads": True}
        parts: Any = torch.autograd.grad(outputs, self.parameters, factors, **options)
        return self._flat(parts)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x), y)
        _check_type(isinstance(loss, Tensor), loss, "loss_fn must return a tensor")
        if loss.dim() > 0:
            raise ValueError(
                f"loss_fn must return the mean loss of a batch, got shape {tuple(loss.shape)}"
            )
        return loss

    def _mean(self, losses: list[Tensor]) -> float:
        """Over all rows, from the mean of each batch; this waits for the device once."""
        pairs = zip(torch.stack(losses).tolist(), self.batches, strict=True)
        return sum(loss * rows_of(x, y) for loss, (x, y) in pairs) / self.images

    def _pass(self, *kinds: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches, counted, with the random numbers of every other pass."""
        self._seed()
        self._rows.update(dict.fromkeys(kinds, self.images))
        for x, y in self.batches:
            # A model may change its inputs in place, and the next pass needs them again.
            yield x.clone() if isinstance(x, Tensor) else x, y

    def _seed(self) -> None:
        torch.default_generator.manual_seed(0)
        for gpu in self.gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(0)

    @torch.no_grad()
    def _recalibrate(self) -> None:
        layers = running_layers(self.model)
        for layer in layers:
            if not isinstance(layer, nn.modules.batchnorm._NormBase):
                raise ValueError(
                    f"batchnorm must be eval or batch for {type(layer).__name__}, whose running "
                    "statistics are not BatchNorm's, got recalibrated"
                )
            layer.reset_running_stats()
        momenta = [layer.momentum for layer in layers]
        seen = 0
        try:
            for layer in layers:
                layer.training = True
            for x, y in self._pass("forward"):
                seen += rows_of(x, y)
                for layer in layers:
                    layer.momentum = rows_of(x, y) / seen  # in the end the mean over all rows
                self.model(x)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.training, layer.momentum = False, momentum

    def _flat(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1).to(self.device, self.dtype) for part in parts])

    def _parts(self, vector: Tensor) -> list[Tensor]:
        parts = zip(vector.split(self._sizes), self.parameters, strict=True)
        return [part.view(p.shape).to(p.device, p.dtype) for part, p in parts]


@contextmanager
def open_objective(
    model: nn.Module, loss_fn: Loss, batches: Batches, batchnorm: Policy
) -> Iterator[Objective]:
    """Set the model up as the policy says; restore it afterwards, also after an error.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If the policy is unknown, the batches are empty or no pairs, or no parameter
            requires a gradient.
    """
    _check_type(isinstance(model, nn.Module), model, "model must be a torch.nn.Module")
    _check_type(callable(loss_fn), loss_fn, "loss_fn must be a function")
    _check_type(isinstance(batches, Iterable), batches, "batches must be a list or a DataLoader")
    if batchnorm not in get_args(Policy):
        raise ValueError(f"batchnorm must be one of {get_args(Policy)}, got {batchnorm!r}")
    objective = Objective(model, loss_fn, batchnorm)
    with ExitStack() as stack:
        stack.enter_context(_restored(model))
        stack.enter_context(torch.random.fork_rng(objective.gpus))
        stack.enter_context(_exact_float32())
        stack.enter_context(torch.autocast(objective.device.type, enabled=False))
        objective.draw(batches)
        model.eval()
        if batchnorm == "batch":
            for layer in running_layers(model):
                layer.training = True  # not its children
        yield objective


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put modes and buffers back afterwards."""
    modules = [(m, m.training, dict(m._buffers)) for m in model.modules()]
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, training, buffers in modules:
            module.training = training
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Turn TF32 off: cuDNN's default rounds float32 too coarsely for second derivatives."""
    cudnn: Any = torch.backends.cudnn
    setting: tuple[Any, str, Any] = cudnn, "allow_tf32", False
    try:
        before = cudnn.allow_tf32
    except RuntimeError:  # the caller uses the newer setting, and torch refuses to mix both
        setting = cudnn.conv, "fp32_precision", "ieee"
        before = cudnn.conv.fp32_precision
    setattr(*setting)
    try:
        yield
    finally:
        setattr(*setting[:2], before)


_MINIMUM: dict[str, int] = {
    **dict.fromkeys(("count", "draws", "iterations", "m", "steps"), 1),
    "hvps": 3,
    "points": 2,
    "seed": 0,
}
"""The smallest value of each integer setting."""


def check(**settings: Any) -> None:
    """Raise unless every setting has its type and range: rho >= 0, other real numbers > 0."""
    for name, value in settings.items():
        kind, words = (Integral, "an integer") if name in _MINIMUM else (Real, "a number")
        right = isinstance(value, kind) and not isinstance(value, bool)
        _check_type(right, value, f"{name} must be {words}")
        minimum = _MINIMUM.get(name, 0)
        above = name not in (*_MINIMUM, "rho")
        if value < minimum or (above and value == 0) or not isfinite(value):
            bound = f"{'>' if above else '>='} {minimum}"
            raise ValueError(f"{name} must be finite and {bound}, got {value}")


def _check_type(right: bool, value: Any, words: str) -> None:
    if not right:
        raise TypeError(f"{words}, got {value!r:.80}")
