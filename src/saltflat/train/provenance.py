"""Where a figure comes from: hardware, versions and the command that prints it again."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
from pathlib import Path

import torch

from saltflat import __version__


def provenance(command: str, device: torch.device) -> dict[str, str]:
    """What a reader needs to measure again what was measured on a device."""
    cuda = torch.version.cuda if device.type == "cuda" else "not used"
    return {
        "hardware": hardware(device),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"CUDA {cuda}, saltflat {__version__}",
        "command": command,
        "date": datetime.date.today().isoformat(),
    }


def hardware(device: torch.device) -> str:
    """The processor that did the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = found[1] if found else platform.processor()
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def command(*words: str) -> str:
    """How to run this again, with data lying where it is run; --out is left out.

    Example:
        >>> command("saltflat", "bench", "--data.name=/home/me/mine.npz", "--out", "runs/bench")
        'saltflat bench --data.name=mine.npz'
    """
    line = list(words)
    if "--out" in line:
        at = line.index("--out")
        del line[at : at + 2]
    return shlex.join(without_folders(word) for word in line if not word.startswith("--out="))


def without_folders(word: str) -> str:
    """A word in which absolute paths, wherever they begin, are names.

    Example:
        >>> without_folders("{saf: {path: /tmp/store.bin, lag: 2}}")
        '{saf: {path: store.bin, lag: 2}}'
    """
    return re.sub(r"""(?<![^\s=:,\[{"'])/(?:[^/,\]}]+/)*(?=[^/])""", "", word)
