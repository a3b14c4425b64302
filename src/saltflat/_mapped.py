"""A table in a file: memory-mapped, larger than RAM, sparse until it is written."""

from __future__ import annotations

import os
import shutil
import weakref
from math import prod
from pathlib import Path

import torch
from torch import Tensor


def mapped_table(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory is the file at `path`, which stays locked while the tensor lives.

    Raises:
        ValueError: If the path cannot be a file, there is one of another size, which may be
            somebody's data, or the disk could not hold the whole table.
        RuntimeError: If another process, or another table of this one, uses the file.
    """
    import fcntl  # the one thing here that Windows has not

    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} is not a file in an existing folder")
    size = prod(shape) * dtype.itemsize
    taken = path.stat().st_size if path.exists() else 0
    if taken not in (0, size):
        raise ValueError(
            f"{path} exists and is not this table ({taken} bytes, not {size}): "
            "remove it or choose another path"
        )
    free = shutil.disk_usage(path.parent).free + (512 * path.stat().st_blocks if taken else 0)
    if free < size:
        raise ValueError(f"{path} will grow to {size} bytes, but its disk has only {free} free")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise RuntimeError(f"{path} is in use by another table: give each its own path") from None
    os.truncate(file, size)
    table = torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).view(shape)
    weakref.finalize(table, os.close, file)  # and so unlock it
    return table
