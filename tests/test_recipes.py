"""The recipes are the paper's tables, and say only what differs from the defaults."""

import inspect
import re
from dataclasses import is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml

from saltflat import MESA, SAF, sam
from saltflat.train.config import Config
from saltflat.train.methods import check_method
from saltflat.train.models import build_model

RECIPES = {p.stem: p for p in (Path(__file__).parent.parent / "recipes").iterdir()}
DEMO, SMALL, FROZEN = "digits_noisy", "cifar10_small", "cifar100_resnet18_mesa_frozen"
DECAYED = "cifar100_resnet18_decayed"

METHODS = {"base", "sam", "asam", "gsam", "esam", "looksam", "msam", "saf", "mesa"} | {
    "label_smoothing",
    "ema",
    "saf_shuffled",
    "saf_uniform",
}
SIGNATURES = {"saf": SAF, "mesa": MESA} | {name.lower(): getattr(sam, name) for name in sam.__all__}

# The cells of both tables.
CIFAR = product(
    ["cifar10", "cifar100"],
    ["resnet18", "resnet101", "wrn28_10", "pyramidnet110"],
    ["base", "sam", "saf", "mesa"],
)
IMAGENET = {
    "resnet50": ["base", "sam", "esam", "gsam", "saf", "mesa"],
    "resnet101": ["base", "sam", "esam", "gsam", "saf", "mesa"],
    "resnet152": ["base", "sam", "gsam", "saf", "mesa"],
    "vit_s32": ["base", "sam", "looksam", "gsam", "saf", "mesa"],
}
CELLS = {"_".join(cell): cell for cell in CIFAR} | {
    f"imagenet_{model}_{method}": ("imagenet", model, method)
    for model, methods in IMAGENET.items()
    for method in methods
}

TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet": "ImageNet"} | {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "resnet152": "ResNet-152",
    "wrn28_10": "WRN-28-10",
    "pyramidnet110": "PyramidNet-110",
    "vit_s32": "ViT-S/32",
    "looksam": "LookSAM",
}
HEADER = re.compile(
    r"# paper: (\d+\.\d+)(?: \+- (\d+\.\d+))?\n# (.+): table \d of the SAF paper\n(?!#)"
)


def load(name):
    return yaml.safe_load(RECIPES[name].read_text())


def figures(name):
    """The accuracy in a recipe's first line and its deviation, None if there is none."""
    accuracy, deviation, _ = HEADER.match(RECIPES[name].read_text()).groups()
    return float(accuracy), deviation and float(deviation)


def built(default, given):
    """The section of the config with what is given; every key is one, and worth its line."""
    assert given, f"{type(default).__name__}: an empty section"
    hints = get_type_hints(type(default))
    values = {}
    for key, value in given.items():
        assert key in hints, key
        usual = getattr(default, key)
        if is_dataclass(usual):
            value = built(usual, value)
        elif get_origin(hints[key]) is Literal:
            assert value in get_args(hints[key]), f"{key}: {value}"
        else:
            # An exact type: YAML reads 3e-5 as a string, and true as a kind of int.
            kinds = get_args(hints[key]) if usual is None else [type(usual)]
            assert type(value) in kinds, f"{key}: {value!r}"
        assert value != usual, f"{key}: {value} is the default"
        values[key] = value
    return type(default)(**values)


def config(name):
    return built(Config(), load(name))


def test_there_is_a_recipe_for_each_cell_of_the_tables_and_four_others():
    assert RECIPES.keys() == CELLS.keys() | {DEMO, SMALL, FROZEN, DECAYED}
    assert {path.suffix for path in RECIPES.values()} == {".yaml"}
    assert len(RECIPES) == 32 + 23 + 4


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_holds_only_what_differs_from_the_defaults(name):
    method = config(name).method
    assert method.name in METHODS
    defaults = check_method(method).settings()
    for key, value in method.settings.items():
        default = defaults[key]
        assert value != default, f"{key}: {value} is the default"
        assert type(value) is (int if default is None else type(default)), f"{key}: {value!r}"


@pytest.mark.parametrize("name", sorted(CELLS))
def test_a_recipe_is_what_its_name_and_comment_say(name):
    data, model, method = CELLS[name]
    recipe = config(name)
    assert recipe.data.name == data
    stem = "cifar_" if data.startswith("cifar") and model.startswith("resnet") else ""
    assert recipe.model == stem + {"vit_s32": "vit_small_patch32_224"}.get(model, model)
    assert recipe.method.name == method
    base = {"sgd": "SGD", "adamw": "AdamW"}[recipe.optimizer.name]
    said = base if method == "base" else TITLES.get(method, method.upper())
    comment = HEADER.match(RECIPES[name].read_text())[3]
    assert comment == f"{TITLES[data]}, {TITLES[model]}, {said}"


@pytest.mark.parametrize("name", sorted(CELLS))
def test_a_recipes_paper_figures_are_numbers(name):
    accuracy, deviation = figures(name)
    if name.startswith("imagenet"):
        assert 68 < accuracy < 81
        assert deviation is None
    else:
        assert 78 < accuracy < 98
        assert 0 < deviation < 0.4


def test_paper_figures_are_the_tables():
    assert figures("imagenet_resnet50_saf") == (77.8, None)
    assert figures("imagenet_resnet152_mesa") == (80.0, None)
    assert figures("imagenet_vit_s32_looksam") == (68.8, None)
    assert figures("cifar10_pyramidnet110_mesa") == (97.46, 0.09)
    assert figures("cifar100_resnet18_saf") == (80.06, 0.05)
    assert figures("cifar100_wrn28_10_sam") == (83.51, 0.04)


@pytest.mark.parametrize("name", sorted(CELLS))
def test_hyper_parameters_are_the_appendixs(name):
    data, model, method = CELLS[name]
    recipe = config(name)
    optimizer = recipe.optimizer
    found = recipe.epochs, recipe.data.batch_size, optimizer.lr, optimizer.weight_decay
    if model == "vit_s32":
        assert found == (300, 4096, 3e-3, 0.3)
    elif data == "imagenet":
        strong = model == "resnet50" and method in ("saf", "mesa")
        assert found == (90, 4096, 1.4, 1e-4 if strong else 3e-5)
    else:
        assert found == (200, 128, 0.05, 1e-3 if model == "wrn28_10" else 5e-4)
    assert recipe.data.augment == ("inception" if data == "imagenet" else "basic")
    assert recipe.label_smoothing == optimizer.warmup_epochs == 0

    if method not in ("sam", "saf", "mesa"):
        return
    parameters = inspect.signature(SIGNATURES[method]).parameters
    settings = {key: p.default for key, p in parameters.items()} | recipe.method.settings
    if method == "sam":
        assert settings["rho"] == {"wrn28_10": 0.1, "pyramidnet110": 0.2}.get(model, 0.05)
        return
    start = 150 if model == "vit_s32" else 10 if data == "imagenet" else 5
    assert (settings["start_epoch"], settings["temperature"]) == (start, 5)
    if method == "saf":
        assert (settings["weight"], settings["lag"]) == (0.3, 3)
    else:
        weight, decay = (0.3, 0.9998) if data == "imagenet" else (0.8, 0.9995)
        assert (settings["weight"], settings["decay"]) == (weight, decay)
        ours = ("warmup", "average_std", "rescale", "freeze_epoch")  # off: the released code's
        assert [settings[name] for name in ours] == [False, False, False, None]
        assert settings["tau_squared"]


def test_the_demo_has_its_setting_and_no_paper_figure():
    assert load(DEMO) == {
        "data": {"train_size": 1000, "label_noise": 0.2},
        "optimizer": {"lr": 0.1},
    }
    text = RECIPES[DEMO].read_text()
    assert text.startswith("# the demo's setting")
    assert "paper" not in text


def test_the_small_one_trains_and_tests_on_training_images():
    recipe = config(SMALL)
    assert (recipe.data.name, recipe.method.name) == ("cifar10", "base")
    assert (recipe.data.train_size - recipe.data.holdout, recipe.data.holdout) == (2000, 10000)
    text = RECIPES[SMALL].read_text()
    assert text.startswith("# for a CPU: 2,000 images of CIFAR-10's training set")
    assert "paper" not in text


def test_mesas_own_is_the_papers_training_with_settings_of_ours():
    recipe, theirs = load(FROZEN), load("cifar100_resnet18_mesa")
    ours = recipe.pop("method")["settings"]
    switches = dict.fromkeys(("warmup", "average_std", "rescale", "another_view"), True)
    assert ours == {**switches, "freeze_epoch": recipe["epochs"] // 2}
    assert theirs.pop("method") == {"name": "mesa"}
    assert recipe == theirs
    assert "paper" not in RECIPES[FROZEN].read_text()


def test_the_decayed_one_is_the_papers_sgd_with_twice_the_weight_decay():
    recipe, theirs = config(DECAYED), config("cifar100_resnet18_base")
    twice = 2 * theirs.optimizer.weight_decay
    assert recipe == replace(theirs, optimizer=replace(theirs.optimizer, weight_decay=twice))
    assert "# paper:" not in RECIPES[DECAYED].read_text()


def test_every_recipe_names_a_model_and_a_method_that_can_be_built():
    recipes = [config(name) for name in RECIPES]
    for recipe in recipes:
        check_method(recipe.method)
    with torch.device("meta"):
        for name, size in {(r.model, r.data.image_size or 32) for r in recipes}:
            assert build_model(name, num_classes=10, image_size=size)(
                torch.empty(2, 3, size, size)
            ).shape == (2, 10)
