"""Checkpoints that a crash cannot spoil and that cannot run code.

A checkpoint is a folder: the weights as safetensors, the rest as a file of tensors and plain values
(loaded with `weights_only`), and a manifest with the sums of both. It is written under another name
and renamed when complete, so what has a checkpoint's name is one. The last two are kept.

Every process has the whole state. Rank 0 writes it, and all of them read it.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from saltflat.train.config import require
from saltflat.train.ranks import ALONE, RankError, Ranks

WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
_KEPT = 2


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the last good one."""


def save_checkpoint(
    run: Path, step: int, weights: dict[str, Tensor], state: dict[str, Any], ranks: Ranks = ALONE
) -> Path:
    """Write `run/checkpoints/<step>`.

    Args:
        run: The run's folder, which several processes share.
        step: Steps done; a later checkpoint has a greater one.
        weights: The model's state_dict.
        state: All else, of tensors and plain values.
        ranks: The processes, all of which call this.

    Raises:
        CheckpointError: If it cannot be written, as on a full disk; the earlier ones are kept.
    """
    folder = run / "checkpoints"
    final, partial = folder / f"{step:09d}", folder / f"{step:09d}.partial"
    try:
        ranks.lead(lambda: _write(partial, final, step, weights, state))
    except (OSError, RuntimeError, SafetensorError) as error:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
        good = next(iter(list_checkpoints(run)), None)
        raise CheckpointError(
            f"could not write checkpoint {final}: {error}. The last good one is {good or 'none'}"
        ) from error
    return final


def _write(
    partial: Path, final: Path, step: int, weights: dict[str, Tensor], state: dict[str, Any]
) -> None:
    for unfinished in partial.parent.glob("*.partial"):
        shutil.rmtree(unfinished)
    partial.mkdir(parents=True)
    save_file(_unshared(weights), partial / WEIGHTS)
    torch.save(state, partial / STATE)
    sums = {name: _sum(partial / name) for name in (WEIGHTS, STATE)}
    (partial / MANIFEST).write_text(json.dumps({"step": step, "sums": sums}))
    for path in partial.iterdir():
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in list_checkpoints(final.parent.parent)[_KEPT:]:
        shutil.rmtree(old)


def list_checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    found = (run / "checkpoints").glob("[0-9]" * 9)
    return sorted((path for path in found if path.is_dir()), reverse=True)


def load_checkpoint(
    run: Path, ranks: Ranks = ALONE
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The weights and state of the run's newest checkpoint; None if it has none.

    Args:
        run: The run's folder.
        ranks: The processes, all of which call this; they need not be as many as have saved it.

    Raises:
        CheckpointError: If the newest one is damaged. It names the one before, which is used once
            the damaged one is removed.
    """
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        return None
    newest, *others = checkpoints
    read: list[Any] = []

    def look() -> None:
        for name, expected in json.loads((newest / MANIFEST).read_text())["sums"].items():
            require(_sum(newest / name) == expected, f"{name} is not what was written")
        read.append(load_file(newest / WEIGHTS))
        read.append(torch.load(newest / STATE, map_location="cpu", weights_only=True))

    try:
        ranks.each(look)
    except Exception as error:
        if ranks.several and not isinstance(error, RankError):
            raise  # nothing is wrong with the checkpoint: another process has gone
        good = others[0] if others else None
        remedy = f"remove it to continue from {good}" if good else "there is no earlier one"
        raise CheckpointError(f"checkpoint {newest} is damaged ({error}): {remedy}") from error
    weights, state = read
    return weights, state


def save_snapshot(run: Path, epoch: int, weights: dict[str, Tensor]) -> None:
    """Keep the weights with which an epoch begins, for good, in `run/snapshots`."""
    path = run / "snapshots" / f"{epoch:05d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(_unshared(weights), partial)
    partial.rename(path)


def load_snapshots(run: Path) -> dict[int, dict[str, Tensor]]:
    """The kept weights, by the epoch that they begin, in order."""
    paths = sorted((run / "snapshots").glob("*.safetensors"))
    return {int(path.stem): load_file(path) for path in paths}


def _unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: contiguous, and tied ones each with a storage of its own."""
    unshared, seen = {}, set()
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if place in seen else tensor
        unshared[name] = unshared[name].contiguous()
        seen.add(place)
    return unshared


def _sum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
