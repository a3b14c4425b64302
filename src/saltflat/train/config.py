"""What a run is: frozen, checked when built, the same in Python, YAML and on the command line.

A method's own settings are checked against its signature, where their defaults are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args, get_origin, get_type_hints


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an error message: the known word that was perhaps meant, and all of them.

    Example:
        >>> nearest("safe", ["base", "saf"])
        "did you mean 'saf'? Known: base, saf"
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}"


def require(holds: bool, message: str) -> None:
    """Raise a ValueError with the message unless something holds."""
    if not holds:
        raise ValueError(message)


def _require_known(config: Any) -> None:
    """What has a list of values, as a Literal or a tuple of one, must be on it."""
    for name, kind in get_type_hints(type(config)).items():
        many = get_origin(kind) is tuple
        kind = get_args(kind)[0] if many else kind
        if get_origin(kind) is Literal:
            value = getattr(config, name)
            for word in value if many else (value,):
                known = get_args(kind)
                require(word in known, f"unknown {name} {word!r}: {nearest(str(word), known)}")


@dataclass(frozen=True)
class DataConfig:
    """Which images, and what is done to them."""

    name: str = "digits"
    """digits, cifar10, cifar100, an .npz file, a folder of images (ImageNet layout), hf:NAME, or
    synthetic:SIDE:CLASSES[:SAMPLES], random images for measuring speed; 2048 unless said."""
    root: str = "data"
    """Where cifar10 and cifar100 are, or are downloaded to."""
    train_size: int | None = None
    """Train on the first so many samples only; digits: train on so many, test on the rest."""
    image_size: int | None = None
    """Side of the images in pixels, to which they are resized. Unless said, 224 for folders and hf,
    and as they are for the others."""
    holdout: int = 0
    """Test on so many of the training samples, which are then not trained on, instead of the test
    set: for choosing settings without a look at it."""
    augment: Literal["none", "basic", "inception"] = "none"
    """basic: pad by an eighth, crop, flip; inception: a random part, resized, flip."""
    cutout: int = 0
    """Side of a square to blank out, in pixels."""
    mixup: float = 0.0
    """The alpha of mixup, of every other batch on average; 0: none."""
    cutmix: float = 0.0
    """The alpha of CutMix, of every other batch on average; 0: none."""
    label_noise: float = 0.0
    """The share of training labels that are replaced by another one."""
    noise_seed: int = 0
    """Which labels these are; the same for every method and seed."""
    batch_size: int = 64
    """Of all processes together."""
    workers: int = 0
    """Processes that load data, for each that trains."""

    def __post_init__(self) -> None:
        _require_known(self)
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        require(self.workers >= 0, f"workers must be 0 or more, got {self.workers}")
        require(self.holdout >= 0, f"holdout must be 0 or more, got {self.holdout}")
        require(self.cutout >= 0, f"cutout must be 0 or more, got {self.cutout}")
        require(
            0 <= self.label_noise < 1, f"label_noise must be within [0, 1), got {self.label_noise}"
        )
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            require(value >= 0, f"{name} must be 0 or more, got {value}")
        require(
            self.train_size is None or self.train_size >= 1,
            f"train_size must be at least 1, got {self.train_size}",
        )
        require(
            self.image_size is None or self.image_size >= 1,
            f"image_size must be at least 1, got {self.image_size}",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """The base optimizer and its schedule: warm-up, then cosine to zero."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    """The highest learning rate."""
    momentum: float = 0.9
    """Of SGD."""
    nesterov: bool = False
    """Whether SGD's step looks ahead along its momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    weight_decay: float = 5e-4
    decay_vectors: bool = True
    """Whether biases and normalisation weights decay too."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises linearly from zero."""
    clip_norm: float | None = None
    """The greatest norm of a step's gradient."""
    accumulate: int = 1
    """Parts in which a batch is computed, one after another."""

    def __post_init__(self) -> None:
        _require_known(self)
        require(0 < self.lr < inf, f"lr must be positive, got {self.lr}")
        require(0 <= self.momentum < 1, f"momentum must be within [0, 1), got {self.momentum}")
        require(
            not self.nesterov or (self.name == "sgd" and self.momentum > 0),
            f"nesterov is for sgd with a momentum, got {self.name} with {self.momentum}",
        )
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"betas must be within [0, 1), got {self.betas}",
        )
        require(0 <= self.weight_decay < inf, f"weight_decay must be >= 0, got {self.weight_decay}")
        require(self.warmup_epochs >= 0, f"warmup_epochs must be >= 0, got {self.warmup_epochs}")
        require(self.accumulate >= 1, f"accumulate must be at least 1, got {self.accumulate}")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"clip_norm must be positive, got {self.clip_norm}",
        )


@dataclass(frozen=True)
class MethodConfig:
    """How it is trained."""

    name: str = "base"
    """See `saltflat methods`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from the method's defaults, e.g. {weight: 0.5} for saf."""


@dataclass(frozen=True)
class Config:
    """A run."""

    data: DataConfig = DataConfig()
    model: str = "small_cnn"
    """See `saltflat models`; any name of timm's too."""
    initialization: Literal["he", "torch"] = "he"
    """Of Saltflat's own models. he: convolutions as in He et al.; torch: every layer as PyTorch
    makes it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    method: MethodConfig = field(default_factory=MethodConfig)
    epochs: int = 40
    seed: int = 0
    label_smoothing: float = 0.0
    precision: Literal["float32", "bf16"] = "float32"
    """bf16: autocast; the weights stay float32."""
    channels_last: bool = False
    compile: bool = False
    """torch.compile of the model."""
    fast: bool = True
    """Keep the images on the GPU and record whole steps there, where that is possible."""
    device: str | None = None
    """None: a GPU if there is one."""
    sync_batchnorm: bool = False
    """Under torchrun, on GPUs: BatchNorm over the batches of all processes, not over each one's."""
    timeout: float = 600.0
    """Under torchrun: seconds until a process that is not heard of is given up."""
    checkpoint_every: int = 1
    """Epochs between checkpoints."""
    evaluate_every: int = 1
    """Epochs between looks at the test set; the last epoch always has one."""
    track_sharpness: int = 0
    """Epochs between measurements of SAM's sharpness on 1024 training images; 0: none."""
    snapshot_every: int = 0
    """Epochs between copies of the weights to keep, for the plane of the trajectory; 0: none."""
    log: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where to log beside metrics.jsonl."""

    def __post_init__(self) -> None:
        _require_known(self)
        require(self.epochs >= 1, f"epochs must be at least 1, got {self.epochs}")
        require(
            0 <= self.label_smoothing < 1,
            f"label_smoothing must be within [0, 1), got {self.label_smoothing}",
        )
        require(0 < self.timeout < inf, f"timeout must be positive, got {self.timeout}")
        require(
            self.checkpoint_every >= 1,
            f"checkpoint_every must be at least 1, got {self.checkpoint_every}",
        )
        require(
            self.evaluate_every >= 1,
            f"evaluate_every must be at least 1, got {self.evaluate_every}",
        )
        require(
            self.track_sharpness >= 0,
            f"track_sharpness must be 0 or more, got {self.track_sharpness}",
        )
        require(
            self.snapshot_every >= 0,
            f"snapshot_every must be 0 or more, got {self.snapshot_every}",
        )
