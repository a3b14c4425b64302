"""The random state of the devices that parameters are on, so that a pass can be repeated."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from saltflat.core import cuda_graph

RandomState = dict[str, Tensor]
"""By the device's name, so that it can go into a checkpoint."""


def random_state(parameters: Iterable[Tensor]) -> RandomState:
    """The state of the CPU's generator and of each GPU's that holds a parameter.

    Inside a CUDA graph's capture a GPU's state can be neither read nor set, and is left out: what
    is random in a captured pass differs between the two passes of a step.
    """
    state = {"cpu": torch.get_rng_state()}
    gpus = {p.device for p in parameters if p.device.type == "cuda"}
    if gpus and not cuda_graph.capturing():
        state |= {str(gpu): torch.cuda.get_rng_state(gpu) for gpu in gpus}
    return state


def set_random_state(state: RandomState) -> None:
    """Go back to where `random_state` was taken; of GPUs, to those that are here."""
    for device, generator_state in state.items():
        if device == "cpu":
            torch.set_rng_state(generator_state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(generator_state, device)
