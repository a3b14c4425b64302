"""Small files of a run: written whole or not at all; strict JSON and Markdown tables."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that a kill leaves the old or the new."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON in which what is not a finite number is null.

    Example:
        >>> to_json({"loss": float("nan"), "low": [float("-inf"), 1.5]})
        '{"loss": null, "low": [null, 1.5]}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def read_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        ValueError: If it is not JSON; the message names the file.
    """
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it") from error


def markdown(lines: list[list[str]]) -> str:
    """A table, of its header and its lines.

    Example:
        >>> print(markdown([["method", "passes"], ["sam", "2 + 2"]]))
        | method | passes |
        | --- | --- |
        | sam | 2 + 2 |
    """
    header, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
