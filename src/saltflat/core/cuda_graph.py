"""CUDA graphs: warm up, capture and replay a step. The only file that knows of capture.

A step that may be captured reads and writes device tensors only. What Python decides in it is part
of `graph_key()`; what Python counts is in `tick()` (see `saltflat.core.registry.Part`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.checks import whole_number
from saltflat.core.registry import Part

_graphed = False
"""Whether a `GraphedStep` runs: it ticks its parts itself."""


def eager() -> bool:
    """Whether a step runs line by line: neither in a `GraphedStep` nor traced by torch.compile."""
    return not (_graphed or torch.compiler.is_compiling())


def tick(part: Part) -> None:
    """Call `part.tick()` after an eager step; a `GraphedStep` does it itself."""
    if eager():
        part.tick()


@torch.library.custom_op("saltflat::keep", mutates_args=())
def keep(tensor: Tensor) -> Tensor:
    """A copy that torch.compile keeps for the backward pass instead of computing it again.

    Rows of a memory must be kept: they are read, and then the memory is written.
    """
    return tensor.clone()


@keep.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def all_parts(given: Iterable[Any]) -> list[Part]:
    """The parts among objects, and inside those that are modules."""
    inside = (each.modules() if isinstance(each, nn.Module) else [each] for each in given)
    return [part for objects in inside for part in objects if isinstance(part, Part)]


@contextmanager
def withhold_ticks() -> Iterator[None]:
    """While entered, parts do not tick themselves."""
    global _graphed
    before, _graphed = _graphed, True
    try:
        yield
    finally:
        _graphed = before


class GraphedStep:
    """A training step, captured on a GPU once per graph key and replayed.

    On a GPU the first `warmup` steps of each key run eagerly on a side stream. They are real steps.
    The next one is captured, and replayed from then on. A key is the `graph_key()` of every part
    and the shape, dtype and device of every input. On the CPU every step runs eagerly.

    Args:
        step: Takes tensors; returns a tensor, a tuple of tensors or None. It zeroes gradients, runs
            forward and backward, and steps the optimizer. Use `autocast(cache_enabled=False)`.
        parts: The terms and optimizers that the step uses; parts inside them, such as MESA's
            teacher, are found. A learning rate must be a tensor on the device: a replay never sees
            a float change.
        warmup: Eager steps before each capture, at least 1.

    Raises:
        ValueError: If `warmup` is below 1.

    Example:
        >>> w = torch.zeros(())
        >>> add = GraphedStep(lambda x: w.add_(x))
        >>> _ = add(torch.tensor(2.0)), add(torch.tensor(3.0))
        >>> w
        tensor(5.)
    """

    def __init__(
        self, step: Callable[..., Any], parts: Iterable[Part | Optimizer] = (), *, warmup: int = 3
    ) -> None:
        if not callable(step):
            raise TypeError(f"step must be a function, got {step!r}")
        self._step = step
        self._warmup = whole_number("warmup", warmup, 1)
        self._given = list(parts)
        self._parts = all_parts(self._given)
        self._taken: Counter[Any] = Counter()
        self._graphs: dict[Any, _Graph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Take a step.

        Returns:
            What the step returned. On a GPU the next replay overwrites it: clone what you keep.

        Raises:
            ValueError: On a GPU, if a learning rate is a float.
        """
        key = (
            tuple(part.graph_key() for part in self._parts),
            tuple((x.shape, x.dtype, x.device) for x in inputs),
        )
        with withhold_ticks():
            outputs = self._run(key, inputs)
        for part in self._parts:
            part.tick()
        return outputs

    def _run(self, key: Any, inputs: tuple[Tensor, ...]) -> Any:
        if not self._can_capture(inputs):
            return self._step(*inputs)
        if key not in self._graphs:
            if self._taken[key] < self._warmup:
                self._taken[key] += 1
                return self._eagerly(inputs)
            self._graphs[key] = self._capture(inputs)
        graph = self._graphs[key]
        for buffer, given in zip(graph.inputs, inputs, strict=True):
            buffer.copy_(given, non_blocking=True)
        graph.replay()
        return graph.outputs

    def _can_capture(self, inputs: tuple[Tensor, ...]) -> bool:
        return any(x.is_cuda for x in inputs)

    def _eagerly(self, inputs: tuple[Tensor, ...]) -> Any:
        self._require_tensor_rates()
        with self._side_stream():
            return self._step(*inputs)

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """The stream of the capture, on which the warm-up steps run too."""
        now = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            yield
        now.wait_stream(self._stream)

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Graph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        buffers = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        # "thread_local": a data loader's thread may call CUDA meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
            outputs = self._step(*buffers)
        return _Graph(buffers, outputs, graph.replay)

    def _require_tensor_rates(self) -> None:
        for part in self._given:
            for group in getattr(part, "param_groups", ()):
                if "lr" in group and not isinstance(group["lr"], Tensor):
                    raise ValueError(
                        f"lr must be a tensor on the device, got {group['lr']!r}: a CUDA graph "
                        "keeps a float for ever. Build the optimizer with lr=torch.tensor(...)"
                    )


class _Graph:
    """A captured step and its static tensors."""

    def __init__(self, inputs: list[Tensor], outputs: Any, replay: Callable[[], None]) -> None:
        self.inputs, self.outputs, self.replay = inputs, outputs, replay


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


RandomState = dict[str, Tensor]
"""Generator states by the device's name, so that a checkpoint can hold them."""


def random_state(parameters: Iterable[Tensor]) -> RandomState:
    """The state of the CPU's generator and of each GPU's that holds a parameter.

    During a capture a GPU's state can be neither read nor set, and is left out: the random numbers
    of a captured pass differ between the two passes of a step.
    """
    state = {"cpu": torch.get_rng_state()}
    gpus = {p.device for p in parameters if p.device.type == "cuda"}
    if gpus and not capturing():
        state |= {str(gpu): torch.cuda.get_rng_state(gpu) for gpu in gpus}
    return state


def set_random_state(state: RandomState) -> None:
    """Restore generators to a `random_state`; GPUs that are missing here are skipped."""
    for device, generator_state in state.items():
        if device == "cpu":
            torch.set_rng_state(generator_state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(generator_state, device)


Replay = Callable[[], None]


def record(body: Callable[[], None], pool: Any) -> Replay:
    """Capture what a function does to tensors, without doing it; returns the replay.

    Raises:
        RuntimeError: If the function does what cannot be captured, such as waiting for the GPU.
    """
    graph = torch.cuda.CUDAGraph()
    # "thread_local": a data loader's thread may call CUDA meanwhile.
    with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), "thread_local"):
        body()
    return graph.replay


@contextmanager
def tuned() -> Iterator[None]:
    """Let cuDNN choose its kernels by timing them: every step has the same shapes."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
