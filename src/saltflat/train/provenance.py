"""Where a figure comes from: hardware, versions and the command that prints it again."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
from dataclasses import fields
from pathlib import Path

import torch

from saltflat import __version__
from saltflat.train.config import Config, DataConfig, MethodConfig, OptimizerConfig


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


def train_command(config: Config) -> str:
    """The command of a run: every option that is not the default.

    Example:
        >>> train_command(Config(DataConfig(train_size=100), epochs=3))
        'saltflat train --data.train_size=100 --epochs=3'
    """
    words = []
    for field in fields(config):
        value, default = getattr(config, field.name), getattr(Config(), field.name)
        if isinstance(value, DataConfig | OptimizerConfig | MethodConfig):
            parts = {f"{field.name}.{f.name}": f.name for f in fields(value)}
        else:
            parts, value, default = {field.name: field.name}, config, Config()
        for option, name in parts.items():
            if (given := getattr(value, name)) != getattr(default, name):
                text = given if isinstance(given, str) else json.dumps(given)
                words.append(f"--{option}={without_folders(text)}")
    return shlex.join(["saltflat", "train", *words])


def without_folders(word: str) -> str:
    """A word in which absolute paths, wherever they begin, are names.

    Example:
        >>> without_folders("{name: /tmp/mine.npz, workers: 2}")
        '{name: mine.npz, workers: 2}'
    """
    return re.sub(r"""(?<![^\s=:,\[{"'])/(?:[^/,\]}]+/)*(?=[^/])""", "", word)
