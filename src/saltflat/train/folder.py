"""A run's folder: whose it is, and which config it holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from saltflat.train.config import Config, DataConfig, MethodConfig, OptimizerConfig
from saltflat.train.files import read_json, to_json

CONFIG, RESULT = "config.json", "result.json"
_FREE = ("timeout", "log", "checkpoint_every")
"""What may be another when a run goes on: it decides how, not what is trained."""


def check_folder(run: Path, config: Config) -> None:
    """See to it that a folder holds no run of another config.

    Raises:
        ValueError: If it does; the message says what differs.
    """
    if not (run / CONFIG).exists():
        return
    ours, default = (json.loads(to_json(dataclasses.asdict(c))) for c in (config, Config()))
    theirs = {**default, **read_json(run / CONFIG)}  # what it does not say was not there to say
    for section in ("data", "optimizer"):
        theirs[section] = {**default[section], **theirs[section]}
    differing = [
        f"{name} is {theirs[name]!r} there"
        for name in ours
        if name not in _FREE and theirs[name] != ours[name]
    ]
    if differing:
        raise ValueError(
            f"{run} holds a run of another config ({'; '.join(differing)}): choose another folder"
        )


def read_config(run: Path) -> Config:
    """The config that a run was started with.

    Raises:
        ValueError: If there is no run.
    """
    path = run / CONFIG
    if not path.exists():
        raise ValueError(f"{run} holds no run: {_instead(run)}")
    values = read_json(path)
    try:
        data, method = DataConfig(**values.pop("data")), MethodConfig(**values.pop("method"))
        optimizer = values.pop("optimizer")
        optimizer["betas"] = tuple(optimizer["betas"])
        values["log"] = tuple(values["log"])
        return Config(data=data, method=method, optimizer=OptimizerConfig(**optimizer), **values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a run's config: {error}") from error


def _instead(run: Path) -> str:
    if not run.is_dir():
        return "there is no such folder"
    found = [path.parent for depth in ("*", "*/*") for path in run.glob(f"{depth}/{CONFIG}")]
    inside = sorted(str(path) for path in found)  # as in compare's folder
    return f"name those inside, as {inside[0]}" if inside else f"there is no {CONFIG}"
