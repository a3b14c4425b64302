"""The processes that train together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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


def take_first_ranks(tensors: list[Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Make every rank's tensors those of rank 0, with one message for each dtype.

    All but those of which each rank has another part, as after `fully_shard`.
    """
    from torch.distributed.tensor import DTensor  # half a second, and for several ranks alone

    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            kinds.setdefault(tensor.dtype, []).append(tensor)
    for alike in kinds.values():
        message = torch.cat([tensor.flatten() for tensor in alike])
        dist.broadcast(message, group=process_group, group_src=0)
        parts = message.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_(
            alike, [part.view(tensor.shape) for part, tensor in zip(parts, alike, strict=True)]
        )
