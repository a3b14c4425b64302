"""SAF and MESA in an Accelerate loop: on its device, and in its checkpoints.

The loop stays the user's; `register` is the one line that SAF or MESA add to it beside their own.
"""

from __future__ import annotations

from typing import Any, TypeVar

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("accelerate is missing: pip install 'saltflat[accelerate]'") from error

from saltflat.mesa import MESA
from saltflat.saf import SAF

Term = TypeVar("Term", SAF, MESA)


def register(accelerator: Accelerator, term: Term) -> Term:
    """Move a term to the accelerator's device, and have its checkpoints hold the term's state.

    In one process `accelerator.register_for_checkpointing(term)` does the latter too. But of
    several processes each has a part of SAF's memory, and Accelerate writes the main one's state
    alone. What is registered here joins the parts; the file then suits any number of processes.

    Args:
        accelerator: Made before the term was built, because it starts torch.distributed.
        term: A SAF or a MESA.

    Returns:
        The same term.

    Example:
        >>> accelerator = Accelerator()
        >>> saf = register(accelerator, SAF(num_samples=10, num_classes=2))
    """
    accelerator.register_for_checkpointing(_Whole(term))
    return term.to(accelerator.device)


class _Whole:
    """A term whose state is that of all processes."""

    def __init__(self, term: SAF | MESA) -> None:
        self.term = term

    def state_dict(self) -> dict[str, Any]:
        return self.term.whole_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.term.load_state_dict(state_dict)
