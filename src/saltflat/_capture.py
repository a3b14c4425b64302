"""What is recorded, to be repeated without Python: whether something is now, and how it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Replay = Callable[[], None]


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph.

    What Python decides then holds for ever: counters must be kept elsewhere, and what changes from
    step to step must be read from tensors.
    """
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def record(body: Callable[[], None], pool: Any) -> Replay:
    """Capture what a function does to tensors; nothing is done to them yet.

    Raises:
        RuntimeError: If the function does what cannot be captured, as waiting for the GPU.
    """
    graph = torch.cuda.CUDAGraph()
    # Another run's loader may do in its thread what is not allowed in this one.
    with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), "thread_local"):
        body()
    return graph.replay


@contextmanager
def tuned() -> Iterator[None]:
    """Let cuDNN choose by trying: every step has the same shapes."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
