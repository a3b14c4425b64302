import re
from dataclasses import FrozenInstanceError, fields

import pytest

from saltflat.train.config import Config, DataConfig, MethodConfig, OptimizerConfig, nearest

NAN, INF = float("nan"), float("inf")
BAD = {
    DataConfig: {
        "augment": ["bsic", ""],
        "batch_size": [0, -64],
        "workers": [-1],
        "cutout": [-2],
        "mixup": [-0.2, NAN],
        "cutmix": [-1.0, NAN],
        "label_noise": [-0.1, 1.0, NAN],
        "train_size": [0, -5],
        "holdout": [-1],
        "image_size": [0, -224],
    },
    OptimizerConfig: {
        "name": ["adam", "SGD"],
        "lr": [0.0, -0.1, NAN, INF],
        "momentum": [-0.9, 1.0, NAN],
        "betas": [(0.9, 1.0), (-0.1, 0.9), (NAN, 0.9)],
        "weight_decay": [-5e-4, NAN, INF],
        "warmup_epochs": [-1.0, NAN],
        "clip_norm": [0.0, -1.0, NAN],
        "accumulate": [0, -1],
    },
    Config: {
        "epochs": [0, -1],
        "label_smoothing": [-0.1, 1.0, NAN],
        "precision": ["fp16", "bfloat16"],
        "timeout": [0.0, -1.0, NAN, INF],
        "checkpoint_every": [0],
        "evaluate_every": [0, -5],
    },
}
CASES = [(c, n, v) for c, names in BAD.items() for n, values in names.items() for v in values]


@pytest.mark.parametrize(("config", "name", "value"), CASES)
def test_a_bad_value_is_named(config, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{re.escape(str(value))}"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (DataConfig, "label_noise", 0.999),
        (DataConfig, "batch_size", 1),
        (DataConfig, "train_size", 1),
        (OptimizerConfig, "momentum", 0.0),
        (OptimizerConfig, "betas", (0.0, 0.0)),
        (OptimizerConfig, "weight_decay", 0.0),
        (OptimizerConfig, "clip_norm", INF),
        (Config, "epochs", 1),
        (Config, "label_smoothing", 0.0),
        (Config, "log", ("tensorboard", "wandb", "trackio")),
    ],
)
def test_the_last_good_value_is_taken(config, name, value):
    assert getattr(config(**{name: value}), name) == value


@pytest.mark.parametrize("other", [{"name": "adamw"}, {"momentum": 0.0}])
def test_nesterov_needs_a_momentum(other):
    with pytest.raises(ValueError, match="nesterov is for sgd with a momentum"):
        OptimizerConfig(nesterov=True, **other)


def test_a_misspelt_word_gets_a_hint():
    with pytest.raises(ValueError, match=r"unknown name 'adam': did you mean 'adamw'\?"):
        OptimizerConfig(name="adam")
    with pytest.raises(ValueError, match=r"unknown log 'tensorbord': did you mean 'tensorboard'"):
        Config(log=("wandb", "tensorbord"))


@pytest.mark.parametrize("config", [DataConfig, OptimizerConfig, MethodConfig, Config])
def test_frozen_equal_and_all_by_default(config):
    built = config()
    assert built == config()
    for field in fields(config):
        with pytest.raises(FrozenInstanceError):
            setattr(built, field.name, getattr(built, field.name))


def test_nearest():
    known = ["sam", "asam", "mesa"]
    assert nearest("mesaa", known) == "did you mean 'mesa'? Known: asam, mesa, sam"
    assert nearest("qqqq", known) == "Known: asam, mesa, sam"
    assert nearest("sam", iter(known)).startswith("did you mean 'sam'?")
