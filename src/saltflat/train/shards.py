"""Checkpoints of several processes: each writes its part, and any number of processes reads them.

torch.distributed.checkpoint says who writes and reads what. Its own files would be pickles, which
can run code; these are safetensors. Beside them is an outline: what is to be loaded, with a tensor
of no content ("meta") where a file has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Key = tuple[Any, ...]
"""Where a tensor is in nested dictionaries and lists."""
Place = Callable[[Key, Tensor], Tensor]
"""What is to be filled, a DTensor where each process has a part, for a key and its outline."""


def write_shards(folder: Path, state: Mapping[str, Any]) -> tuple[Any, list[Path]]:
    """Write the tensors of a state; all processes call it at once.

    Args:
        folder: Which is there.
        state: Nested dictionaries and lists. What is no DTensor is the same on all processes.

    Returns:
        The outline, and the files that this process has written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors: dict[str, Tensor] = {}

    def noted(key: Key, tensor: Tensor) -> Tensor:
        tensors[_name(key)] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    outline = mapped(noted, state)
    writer, _ = storage()
    try:
        save(tensors, storage_writer=writer(str(folder), save_distributed=True))
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(str(error)) from error
    return outline, sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))


def read_shards(folder: Path, outline: Any, place: Place) -> Any:
    """The state that an outline is of, as `place` divides it among the processes here."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors: dict[str, Tensor] = {}

    def placed(key: Key, like: Tensor) -> Tensor:
        tensors[_name(key)] = place(key, like)
        return tensors[_name(key)]

    state = mapped(placed, outline)
    _, reader = storage()
    try:
        with warnings.catch_warnings():  # one process is what is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=reader(str(folder)), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error
    return state


def whole(key: Key, like: Tensor) -> Tensor:
    """The `Place` of one process: all of it, in host memory."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def cut(state: Any, place: Place) -> Any:
    """A whole state, divided among the processes as `place` says."""

    def part(key: Key, tensor: Tensor) -> Tensor:
        target: Any = place(key, tensor)
        if not hasattr(target, "to_local"):
            return tensor
        from torch.distributed.tensor import distribute_tensor

        whole = tensor.to(target.device)
        # Each process has read the whole: nothing needs to be sent.
        return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)

    return mapped(part, state)


def mapped(change: Callable[[Key, Tensor], Any], state: Any, key: Key = ()) -> Any:
    """A nested state with something else for each of its tensors.

    Example:
        >>> mapped(lambda key, tensor: key, {"a": [torch.ones(1), 2]})
        {'a': [('a', 0), 2]}
    """
    if isinstance(state, Tensor):
        return change(key, state)
    if isinstance(state, Mapping):
        return {name: mapped(change, part, (*key, name)) for name, part in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(mapped(change, part, (*key, i)) for i, part in enumerate(state))
    return state


def _name(key: Key) -> str:
    return ".".join(str(part) for part in key)


def storage() -> tuple[Any, Any]:
    """What writes and reads files of safetensors, where torch has it."""
    try:
        from torch.distributed.checkpoint.hf_storage import (
            HuggingFaceStorageReader,
            HuggingFaceStorageWriter,
        )
    except ImportError as error:
        raise ImportError(
            f"checkpoints of several processes need a newer torch than {torch.__version__}: "
            "pip install --upgrade torch"
        ) from error
    return HuggingFaceStorageWriter, HuggingFaceStorageReader
