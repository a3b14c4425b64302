"""Trajectory terms in an Accelerate loop: on its device, and in its checkpoints.

The loop stays the user's, with the term's lines in it; `register` is one more.
"""

from __future__ import annotations

from typing import TypeVar

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("accelerate is missing: pip install 'saltflat[accelerate]'") from error

from saltflat.terms import TrajectoryTerm

__all__ = ["register"]

Term = TypeVar("Term", bound=TrajectoryTerm)


def register(accelerator: Accelerator, term: Term) -> Term:
    """Move a term to the accelerator's device, and put its state into the checkpoints.

    `accelerator.save_state` then calls `term.sync()` on every process. On one process,
    `accelerator.register_for_checkpointing(term)` is enough.

    Args:
        accelerator: Build it before the term, because it starts torch.distributed.
        term: Any trajectory term.

    Returns:
        The same term.

    Example:
        >>> from saltflat import SAF
        >>> accelerator = Accelerator()
        >>> saf = register(accelerator, SAF(num_samples=10, num_classes=2))
    """
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: term.sync())
    accelerator.register_for_checkpointing(term)
    return term.to(accelerator.device)
