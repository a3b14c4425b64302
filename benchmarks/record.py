"""How a measurement is written down: a table and raw JSON, with hardware, versions and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import saltflat

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """The processor that did the work."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = found[1] if found else platform.processor()
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def command() -> str:
    """How to run this again, from the repository's root, with data lying there."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    names = [Path(a).name if Path(a).is_absolute() else a for a in arguments]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *names])


def context() -> dict[str, str]:
    """What a reader needs to run it again."""
    return {
        "hardware": hardware(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda if torch.cuda.is_available() else 'not used'}, "
        f"saltflat {saltflat.__version__}",
        "command": command(),
        "date": datetime.date.today().isoformat(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([str(v) for v in row.values()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(theme: str, title: str, sections: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Print the tables, and write them as `<theme>_<hardware>_<date>.md` and `.json`."""
    facts = context()
    body = [f"# {title}", *(f"- {name}: `{value}`" for name, value in facts.items())]
    for heading, rows in sections.items():
        body += ["", heading, "", table(rows)]
    text = "\n".join(body) + "\n"
    print(text)
    machine = "cpu" if not torch.cuda.is_available() else hardware().split()[-1].lower()
    stem = out / f"{theme}_{machine}_{facts['date']}"
    out.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps({**facts, "tables": sections}, indent=1) + "\n")
