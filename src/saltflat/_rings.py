"""What a memory of outputs saves and loads: its rings of outputs and stamps, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat._clock import Clocked

NEVER = torch.iinfo(torch.int32).min
"""The stamp of a row that was not written: `lag` before no epoch."""


class Rings(Clocked):
    """A table of `lag` slots and a stamp for each row, both with a last row that is not kept.

    They are attributes rather than buffers, so moving or casting a module leaves them alone; the
    state has them all the same.
    """

    num_samples: int
    lag: int
    _block: range
    """The samples that are kept here."""
    _table: Tensor
    _stamps: Tensor

    def settle(self) -> None:
        """Have in the table what was written."""
        raise NotImplementedError

    def _take_place(self, device: torch.device) -> None:
        """Have memory for the table, on this device if there is none yet."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.settle()
        for name, tensor in self._rings().items():
            destination[prefix + name] = tensor
        if len(self._block) < self.num_samples:
            destination[prefix + "block"] = torch.tensor(self._part(), device="cpu")

    def shards(self, prefix: str, process_group: dist.ProcessGroup | None) -> dict[str, Any]:
        """The rings of all ranks, as DTensors of which each rank has its block of samples."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        self.settle()
        group, shards = process_group or dist.group.WORLD, {}
        for name, ring in self._rings().items():
            mesh = DeviceMesh.from_group(cast(Any, group), ring.device.type)
            whole = torch.empty(self.lag, self.num_samples, *ring.shape[2:], device="meta")
            shards[prefix + name] = DTensor.from_local(
                ring.contiguous(),
                mesh,
                [Shard(1)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        return shards

    def take_shards(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Make of the rings of all ranks in a state those of this one."""
        for name in ("table", "stamps"):
            if hasattr(shard := state_dict.get(prefix + name), "to_local"):
                state_dict[prefix + name] = cast(Any, shard).to_local()
                state_dict[prefix + "block"] = torch.tensor(self._part())

    def _part(self) -> list[int]:
        return [self._block.start, self._block.stop, self.num_samples]

    def refuse_another_block(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Raise RuntimeError if a state has the outputs of other samples than those kept here."""
        if prefix + "table" not in state_dict:
            return
        kept = len(self._block)  # as many as are loaded, or their shape would be another
        block = state_dict.get(prefix + "block")
        loaded = [0, kept, kept] if block is None else block.tolist()
        if loaded != self._part():
            first, stop, samples = loaded
            raise RuntimeError(
                f"the loaded samples are {first}..{stop - 1} of {samples}, those kept here "
                f"{self._block.start}..{self._block.stop - 1} of {self.num_samples}: load what the "
                "same rank of as many ranks has saved. Nothing was loaded"
            )

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Copy both rings and the epoch, or nothing."""
        rings = {prefix + name: ring for name, ring in self._rings().items()}
        epoch = prefix + "_extra_state"
        missing = [name for name in (*rings, epoch) if name not in state_dict]
        wrong = [
            f"{name} is {state_dict[name].dtype} of shape {tuple(state_dict[name].shape)}, but "
            f"(lag, num_samples, ...) here is {ring.dtype} of shape {tuple(ring.shape)}"
            for name, ring in rings.items()
            if name not in missing
            and (state_dict[name].shape, state_dict[name].dtype) != (ring.shape, ring.dtype)
        ]
        missing_keys += missing
        error_msgs += wrong
        if missing or wrong:
            return
        self.refuse_another_block(state_dict, prefix)
        self.settle()  # before what is loaded, not after it
        self._take_place(state_dict[prefix + "table"].device)
        for name, ring in self._rings().items():
            ring.copy_(state_dict[prefix + name])
        self.set_extra_state(state_dict[epoch])

    def _rings(self) -> dict[str, Tensor]:
        """The state: all but the last row, seen as (lag, num_samples, ...)."""
        shape, width = (self.lag, len(self._block)), self._table.shape[1]
        if self._table.is_meta:  # nothing was written: one element, seen as if it were all
            table = torch.zeros((), dtype=self._table.dtype, device="cpu")
            stamps = torch.full((), NEVER, dtype=torch.int32, device="cpu")
            return {"table": table.expand(*shape, width), "stamps": stamps.expand(shape)}
        return {
            "table": self._table[:-1].view(*shape, width),
            "stamps": self._stamps[:-1].view(shape),
        }
