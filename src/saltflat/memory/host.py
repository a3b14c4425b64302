"""Rows between a GPU and a memory on the host: pinned buffers and asynchronous copies."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy host rows to a device without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class WriteBehind:
    """One batch on its way to the host; `wait` gives it when it has arrived."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        device = tensors[0].device
        self._copies = []
        for tensor in tensors:
            pinned = device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._copies.append(host.copy_(tensor, non_blocking=pinned))
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """The batch, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
