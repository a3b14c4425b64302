"""Whether what runs now is being recorded, to be repeated without Python."""

from __future__ import annotations

import torch


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph.

    What Python decides then holds for ever: counters must be kept elsewhere, and what changes from
    step to step must be read from tensors.
    """
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
