"""A row of a table, as it is written: a recipe's name, and the options that differ from it."""

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
            method = {"name": value, "settings": {}}
        else:
            (values.setdefault(section, {}) if section else values)[name] = value
    if data is not None:
        values["data"]["name"] = data
    parts = {name: kind(**values.pop(name, {})) for name, kind in SECTIONS.items()}
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
