"""A row of a table, as it is written: a recipe's name, and the options that differ from it.

Rows are written with the names and defaults that MESA and the moving average had in version 0.1,
with which the kept runs were made. `renamed` gives the settings of today.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from studies import STUDIES

from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig
from saltflat.train.config import nearest, require
from saltflat.train.methods import check_kind
from saltflat.train.state import check_config

RECIPES = Path(__file__).parent.parent / "recipes"
EVERY = 5
"""Epochs between looks at the test set, in runs of 51 to 399."""
FAST: dict[str, Any] = {"precision": "bf16", "channels_last": True, "compile": True}
"""How runs are made on a GPU, unless an option says otherwise."""
SECTIONS: dict[str, Any] = {"data": DataConfig, "optimizer": OptimizerConfig}
UNSAID = {"seed", "track_sharpness", "checkpoint_every", "evaluate_every", "log", "betas"}
"""What is not for a run's line to say."""
OPTIONS: dict[str, Any] = {
    ".".join([*part, name]): value
    for part, config in [([], Config()), *(([name], kind()) for name, kind in SECTIONS.items())]
    for name, value in vars(config).items()
    if name not in UNSAID | SECTIONS.keys()
} | {
    "method": "base",
    "device": "cpu",
    "optimizer.clip_norm": 1.0,
    "data.train_size": 1,
    "data.image_size": 1,
}
"""What it may say beside the method's settings, and a value of the kind."""


DEFAULTS: dict[str, dict[str, Any]] = {
    "mesa": {"warmup": True, "deviations": True, "match": "nearest"},
    "ema": {"warmup": True, "deviations": True},
}
"""Of version 0.1, where today's differ: what `method=mesa` and `method=ema` mean in a row."""
USUAL: dict[str, Any] = {"batch_statistics": False, "interval": 1}
"""Settings of version 0.1 that MESA has no more, and the only values that can be left out."""
GONE = {"method.match=spread", "method.batch_statistics=true"}
"""Options of rows that only version 0.1 could train."""


def renamed(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A method's settings as version 0.1 named them, under their names of today.

    Raises:
        ValueError: If only version 0.1 can run them.

    Example:
        >>> renamed("mesa", {"deviations": False, "match": "nearest", "interval": 1})
        {'average_std': False, 'rescale': True}
    """
    if method not in DEFAULTS:
        return settings
    found = {}
    for name, value in settings.items():
        if name in USUAL or (name == "match" and value not in ("none", "nearest")):
            require(value == USUAL.get(name), f"{name}={value} is gone: version 0.1 had it")
        elif name == "match":
            found["rescale"] = value == "nearest"
        else:
            found["average_std" if name == "deviations" else name] = value
    return found


def method_of(line: str) -> str:
    """The name of a run's method."""
    recipe, *options = line.split()
    values = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    said = [option.removeprefix("method=") for option in options if option.startswith("method=")]
    return str(said[0] if said else values.get("method", {}).get("name", "base"))


def config_of(line: str, seed: int, data: str | None = None) -> Config:
    """A run: a recipe's name, and options as data.cutout=16, method=ema or method.weight=0.3.

    Raises:
        ValueError: If there is no such recipe or option, or a value is none for it.
    """
    recipe, *options = line.split() or [""]
    recipes = {path.stem: path for path in RECIPES.glob("*.yaml")}
    require(recipe in recipes or recipe not in STUDIES, f"{recipe} is a study, not a run")
    require(
        recipe in recipes, f"no study or recipe {recipe!r}: {nearest(recipe, [*STUDIES, *recipes])}"
    )
    values: dict[str, Any] = yaml.safe_load(recipes[recipe].read_text())
    values = {**(FAST if torch.cuda.is_available() else {}), **values, "seed": seed}
    method = {"name": "base", "settings": {}, **values.pop("method", {})}
    keys = [option.partition("=")[0] for option in options]
    for at, option in enumerate(options):
        key, _, text = option.partition("=")
        require(text != "", f"{option!r} is not name=value")
        require("/" not in text, f"{option!r}: runs' folders have the names of their options")
        require(key not in keys[:at], f"{key} is said twice")
        value, (section, _, name) = _value(text), key.rpartition(".")
        if section == "method":
            method["settings"][name] = value
            continue
        require(key in OPTIONS, f"no option {key!r}: {nearest(key, OPTIONS)}")
        check_kind(section or "a run", name, value, OPTIONS[key])
        if key == "method":
            before = [given for given in options[:at] if given.startswith("method.")]
            require(
                not before, f"{' '.join(before)} must stand after {option}, whose setting it is"
            )
            method = {"name": value, "settings": dict(DEFAULTS.get(value, {}))}
        else:
            (values.setdefault(section, {}) if section else values)[name] = value
    if data is not None:
        values["data"]["name"] = data
    parts = {name: kind(**values.pop(name, {})) for name, kind in SECTIONS.items()}
    method["settings"] = renamed(method["name"], method["settings"])
    config = Config(**parts, **values, method=MethodConfig(**method), track_sharpness=10)
    check_config(config)
    tests = EVERY * max(1, config.epochs // 200) if config.epochs > 50 else 1
    return dataclasses.replace(config, checkpoint_every=config.epochs, evaluate_every=tests)


def _value(text: str) -> Any:
    """As in YAML; 1e-3, which YAML takes for a word, is a number."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is no value") from None
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def folder_of(line: str) -> str:
    """Where its runs go.

    Example:
        >>> folder_of("cifar100_resnet18_saf method.storage=uint8 epochs=60")
        'cifar100_resnet18_saf-storage_uint8-epochs_60'
    """
    recipe, *options = line.split()
    changes = (option.partition("=")[::2] for option in options)
    return "-".join([recipe, *(f"{key.split('.')[-1]}_{value}" for key, value in changes)])
