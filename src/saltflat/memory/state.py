"""Plain tensors in a module's state: saved, checked and loaded in place.

As buffers they would follow `.to()`, be cast with the module and be overwritten by DDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class PlainState(nn.Module):
    """A module whose `plain_state` is part of its state dict.

    A state that does not fit is refused before anything is loaded: torch would load what fits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_require_fit)

    def plain_state(self) -> dict[str, Tensor]:
        """The tensors by name."""
        raise NotImplementedError

    def take_plain_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy tensors of a checked state in place."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in self.plain_state().items()})

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
        args = (state_dict, prefix, local_metadata, strict)
        super()._load_from_state_dict(*args, missing_keys, unexpected_keys, error_msgs)
        own = self.plain_state().keys()
        unexpected_keys[:] = [key for key in unexpected_keys if key.removeprefix(prefix) not in own]
        missing = [prefix + name for name in own if prefix + name not in state_dict]
        missing_keys += missing
        if not missing:
            self.take_plain_state({name: state_dict[prefix + name] for name in own})


def _require_fit(module: PlainState, state_dict: Any, prefix: str, *_: Any) -> None:
    tensors = {
        **module.plain_state(),
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    }
    for name, own in tensors.items():
        loaded = state_dict.get(prefix + name)
        if loaded is not None and (loaded.shape, loaded.dtype) != (own.shape, own.dtype):
            raise RuntimeError(
                f"{prefix}{name} of the loaded state is {loaded.dtype} of shape "
                f"{tuple(loaded.shape)}, not {own.dtype} of shape {tuple(own.shape)}: it belongs "
                f"to a {type(module).__name__} with other settings. Nothing was loaded"
            )
