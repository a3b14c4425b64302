"""What can be said to each command, beside a run's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class TrainOptions:
    """Where a run goes."""

    out: str | None = None
    """The run's folder; runs/<data>_<method>_seed<seed> unless said."""
    resume: str | None = None
    """A run's folder to go on with; its own config is used."""


@dataclass(frozen=True)
class MethodsOptions:
    """Which methods, and with which settings."""

    methods: tuple[str, ...] = ("base", "sam", "saf", "mesa")
    """The first is the base that the others are compared with."""
    settings: dict[str, dict[str, Any]] | None = None
    """What differs from a method's defaults, by its name: {saf: {weight: 0.5}}."""


@dataclass(frozen=True)
class CompareOptions(MethodsOptions):
    """What is compared, and how often."""

    seeds: int = 3
    jobs: int = 1
    """Runs at once."""
    budget: Literal["epochs", "time"] = "epochs"
    """time: a slower method trains for fewer epochs."""
    out: str = "runs/compare"


@dataclass(frozen=True)
class BenchOptions(MethodsOptions):
    """What is measured, and how often."""

    rounds: int = 7
    """Each takes every method in turn; one more comes first, to warm up."""
    steps: int = 10
    """Of a method in a round: a multiple of five for looksam, which climbs every fifth step."""
    accuracies: dict[str, float] | None = None
    """Of methods, in percent, for a picture of accuracy against speed: {base: 76.0, saf: 77.8}."""
    out: str | None = None
    """A folder for bench.json, bench.md and the picture."""


@dataclass(frozen=True)
class SharpnessOptions:
    """What is measured, and on what."""

    measures: tuple[str, ...] = ("sam", "adaptive", "eigenvalues", "trace")
    """Of sam, max, m, adaptive, average, eigenvalues, trace, spectrum: docs/guides/sharpness.md."""
    rho: float | None = None
    """Of every measure that has one; each has its own unless said."""
    settings: dict[str, dict[str, Any]] | None = None
    """What else differs from a measure's defaults, by its name: {max: {steps: 50}}."""
    images: int = 1024
    """Training images, without augmentation; all where a run has fewer."""
    seed: int = 0
    """Which images, and which random vectors: the same for every run."""
    batchnorm: Literal["eval", "recalibrated", "batch"] = "eval"
    """What BatchNorm normalises with: running statistics, those of the images at the weights where
    the loss is taken, or those of each batch."""
    precision: Literal["float32", "float64"] = "float32"
    teacher: bool = False
    """Measure the moving average that mesa and ema keep, instead of the model."""
    device: str | None = None
    """Instead of the one that a run was trained on."""
    out: str | None = None
    """A file for everything as JSON; a spectrum is only there."""


@dataclass(frozen=True)
class LandscapeOptions:
    """What of the loss is shown."""

    mode: Literal["plane", "line", "between", "trajectory"] = "plane"
    """plane or line: along random directions, the same for every run; between: the line from the
    first of two runs to the second; trajectory: the plane of a run's snapshots."""
    points: int = 100
    """Along an axis."""
    span: float = 1.0
    """How far: 1 is each filter's own length, or from run to run, or around the trajectory."""
    seed: int = 0
    """Of the random directions."""
    images: int = 1000
    """Of the training set, without augmentation."""
    batchnorm: Literal["eval", "batch"] | None = None
    """Statistics: eval, the model's own; batch, those of every 256 images. Unless said, eval, and
    batch for a trajectory."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """auto: bf16 on a GPU that has it, if the losses agree."""
    device: str | None = None
    """Unless said, where the run was trained."""
    out: str | None = None
    """A file for one surface, instead of landscape.npz in the run's folder."""
    figures: str | None = None
    """A folder for pictures of all, on one scale, as PNG and SVG."""
