"""The processes that train together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """A process group, or none, that copies of its owner share."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.it = process_group

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce__(self) -> Any:
        if self.it is not None:
            raise TypeError("a process group cannot be pickled: save the state_dict instead")
        return Group, (None,)


def world(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank and how many there are; 0 and 1 without torch.distributed.

    Raises:
        ValueError: If this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process_group that it was given")
    return rank, dist.get_world_size(process_group)


def local(tensors: Iterable[Any]) -> list[Tensor]:
    """The tensors themselves, or this rank's parts of those that are sharded by `fully_shard`.

    Changing a part in place changes the tensor. Do not use it where gradients are recorded.
    """
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def sharded(tensors: list[Any]) -> bool:
    """Whether each rank has another part of them."""
    return bool(tensors) and hasattr(tensors[0], "to_local")


def summed(number: Tensor, tensors: list[Any]) -> Tensor:
    """A number of this rank's parts of sharded tensors, summed over the parts of all ranks."""
    dist.all_reduce(number, group=tensors[0].device_mesh.get_group())
    return number


def take_first_ranks(tensors: list[Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Make every rank's tensors those of rank 0, with one message for each device and dtype.

    All but those of which each rank has another part, as after `fully_shard`.
    """
    from torch.distributed.tensor import DTensor  # takes half a second to import

    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in kinds.values():
        message = torch.cat([tensor.flatten() for tensor in alike])
        # Every backend can send bytes.
        dist.broadcast(message.view(torch.uint8), group=process_group, group_src=0)
        parts = message.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_(
            alike, [part.view(tensor.shape) for part, tensor in zip(parts, alike, strict=True)]
        )


def message_device(tensor: Tensor, process_group: dist.ProcessGroup | None) -> torch.device:
    """The device that the group's collectives need: NCCL takes no tensor on the CPU."""
    backend = dist.get_backend(process_group)
    if backend == "nccl" and not tensor.is_cuda:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if backend == "gloo" else tensor.device
