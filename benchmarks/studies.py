"""What is trained for docs/results*.md: for each table a list of runs, to compare with the first.

A run is a recipe's name and the options that differ from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Study:
    """A table."""

    title: str
    lines: tuple[str, ...]
    """Its runs; the first is the base."""


def _changes(base: str, changes: list[str], *others: str) -> tuple[str, ...]:
    """A run, the same with each of some changes, and other runs."""
    return (base, *(f"{base} {change}" for change in changes), *others)


RESNET = "cifar100_resnet18"
_WARM = "method.warmup=true"
"""Of ours: the paper's MESA, and so its recipe, has none."""
_MESA = f"{RESNET}_mesa {_WARM}"
_SHORT = f"{_MESA} epochs=50"
_QUARTER = "method.temperature=1.0 method.weight=1.0 method.start_epoch=12"
_VIEW = "method.another_view=true"
_UNMATCHED = "method.match=none"
_SPREAD = "method.match=spread"
_NEAREST = "method.match=nearest"
_LONG = "method.decay=0.9999"
"""Not reached by the warm-up in 200 epochs: the average is of a ninth of the steps so far."""
_VARIANCES = "method.deviations=false"
"""As in the paper's code, and so in the recipes of MESA."""
_LETTER = "method.tau_squared=false method.warmup=false"
"""The paper's equations, of MESA; with the square it is what the released code does."""
_SMALL = f"cifar10_small method=mesa {_VARIANCES} method.decay=0.9937"
"""Half of what is averaged is 3.5 epochs old, as with 0.9995 on all of CIFAR."""
_DECAYED = "cifar10_small epochs=200 optimizer.weight_decay=0.005"
_AVERAGED = f"{_DECAYED} method=mesa method.decay=0.9995"
_HALF = "method.start_epoch=100"
_FROZEN = f"{RESNET}_mesa_frozen"
"""Another view, the nearest multiple, deviations, and a teacher that stops in epoch 100."""
_TWICE = f"{RESNET}_decayed"
"""Twice the paper's weight decay, as the commands of the first author's ESAM have it."""
_SHRINKING = "cifar10_small epochs=400 optimizer.weight_decay=0.006"
_DIGITS = (
    *("method=base", "method=sam", "method=saf"),
    "method=saf method.temperature=1.0 method.weight=1.0",
    *_changes(
        f"method=mesa {_UNMATCHED}",
        [
            *(f"method.temperature=2.0 method.weight={weight}" for weight in (0.3, 0.8)),
            *(f"method.temperature=1.0 method.weight={weight}" for weight in (1.0, 3.0)),
            "method.temperature=1.0 method.weight=1.0 method.start_epoch=10",
            *("method.weight=0.3", "method.weight=0.1", "method.tau_squared=false"),
        ],
    ),
    *(f"method=mesa {weight}{_SPREAD}" for weight in ("method.weight=0.3 ", "")),
    *(f"method=mesa {weight}{_NEAREST}" for weight in ("method.weight=0.3 ", "")),
    *_changes(f"method=mesa {_UNMATCHED} method.decay=0.98", ["method.warmup=false"]),
    *_changes("method=mesa method.decay=0.98", ["method.warmup=false"]),
    *_changes("method=mesa method.freeze_epoch=20", ["method.start_epoch=20"]),
    *(f"method={name}" for name in ("label_smoothing", "ema", "saf_shuffled", "saf_uniform")),
)
STUDIES = {
    "table": Study(
        "CIFAR-100, ResNet-18, 200 epochs: the paper's settings, a frozen MESA, and controls",
        (
            *(f"{RESNET}_{method}" for method in ("base", "sam", "saf", "mesa")),
            _MESA,
            f"{RESNET}_mesa_frozen",
            *(
                f"{RESNET}_base method={name}"
                for name in ("label_smoothing", f"ema {_VARIANCES}", "saf_shuffled", "saf_uniform")
            ),
        ),
    ),
    "mesa_200": Study(
        "MESA's settings: CIFAR-100, ResNet-18, 200 epochs",
        (
            f"{RESNET}_base",
            *(f"{RESNET}_base method=ema {how}{_LONG}" for how in (f"{_VARIANCES} ", "")),
            *_changes(
                f"{_MESA} {_VIEW}",
                [
                    *("method.weight=0.3", "method.weight=0.1", "method.tau_squared=false"),
                    *(_SPREAD, f"{_SPREAD} method.weight=0.3"),
                    f"{_SPREAD} method.weight=0.3 method.start_epoch=100",
                    *(_NEAREST, f"{_NEAREST} method.weight=0.3"),
                    *(
                        f"{_NEAREST} {weight}{_LONG}{how}"
                        for weight in ("", "method.weight=0.3 ")
                        for how in ("", " method.deviations=true")
                    ),
                    "method.temperature=1.0 method.weight=1.0",
                ],
            ),
        ),
    ),
    "letter": Study(
        "Without the squared temperature or the warm-up: CIFAR-100, ResNet-18, 200 epochs",
        (
            f"{RESNET}_base",
            f"{RESNET}_saf method.tau_squared=false",
            *_changes(f"{RESNET}_mesa", ["method.tau_squared=false"]),
        ),
    ),
    "frozen_200": Study(
        "A teacher that stops half-way: CIFAR-100, ResNet-18, 200 epochs",
        (
            f"{RESNET}_base",
            *_changes(
                f"{_MESA} {_NEAREST} method.deviations=true",
                [
                    _HALF,
                    "method.freeze_epoch=100",
                    f"method.freeze_epoch=100 {_HALF}",
                ],
            ),
            *_changes(
                _FROZEN,
                ["method.freeze_epoch=null", "method.freeze_epoch=140", "method.weight=0.3"],
            ),
        ),
    ),
    "shrinking": Study(
        "A long average of SGD's weights: 2,000 small images of CIFAR-10, 400 epochs",
        tuple(
            f"{_SHRINKING} method=ema {how}method.decay=0.9995" for how in (f"{_VARIANCES} ", "")
        ),
    ),
    "cifar10": Study(
        "CIFAR-10, ResNet-18, 200 epochs, the paper's settings",
        (
            *(f"cifar10_resnet18_{method}" for method in ("base", "sam", "saf", "mesa")),
            f"cifar10_resnet18_mesa {_WARM}",
        ),
    ),
    "wrn": Study(
        "CIFAR-100, WRN-28-10, 200 epochs, the paper's settings",
        ("cifar100_wrn28_10_base", "cifar100_wrn28_10_saf"),
    ),
    "gap": Study(
        "SGD with one change: CIFAR-100, ResNet-18, 200 epochs",
        _changes(
            f"{RESNET}_base",
            [
                *("data.cutout=16", "optimizer.nesterov=true", "optimizer.decay_vectors=false"),
                *("initialization=torch", "method=label_smoothing"),
            ],
            _TWICE,
        ),
    ),
    "precision": Study(
        "SGD in float32: CIFAR-100, ResNet-18, 50 epochs",
        _changes(f"{RESNET}_base epochs=50", ["precision=float32"]),
    ),
    "decayed": Study(
        "With twice the weight decay: CIFAR-100, ResNet-18, 200 epochs",
        _changes(
            _TWICE,
            [
                *("method=sam", "method=saf"),
                f"method=mesa {_VIEW} method.freeze_epoch=100",
                "method=label_smoothing",
                *("data.cutout=16", "method=sam data.cutout=16", "method=saf data.cutout=16"),
            ],
        ),
    ),
    "cutout": Study(
        "With Cutout: CIFAR-100, ResNet-18, 200 epochs",
        (
            *(f"{RESNET}_{method} data.cutout=16" for method in ("base", "sam", "saf")),
            *(
                f"{_MESA} data.cutout=16 {_VIEW} {_NEAREST} {change}"
                for change in (
                    "method.weight=0.3",
                    f"method.weight=0.3 {_LONG}",
                    f"method.weight=0.3 {_LONG} method.deviations=true",
                )
            ),
        ),
    ),
    "smoothed": Study(
        "With label smoothing: CIFAR-100, ResNet-18, 200 epochs",
        (
            f"{RESNET}_base method=label_smoothing",
            *(f"{RESNET}_{method} label_smoothing=0.1" for method in ("sam", "saf")),
            f"{_MESA} label_smoothing=0.1 {_VIEW} {_NEAREST} method.weight=0.3",
        ),
    ),
    "stores": Study(
        "SAF's storage: CIFAR-100, ResNet-18, 200 epochs",
        _changes(f"{RESNET}_saf", ["method.storage=float32", "method.storage=uint8"]),
    ),
    "mesa": Study(
        "MESA's settings: CIFAR-100, ResNet-18, 50 epochs",
        (
            f"{RESNET}_base epochs=50",
            f"{RESNET}_saf epochs=50",
            f"{RESNET}_saf epochs=50 method.temperature=1.0 method.weight=1.0",
            *_changes(
                _SHORT,
                [
                    "method.weight=0.3",
                    "method.start_epoch=25",
                    "method.decay=0.9998",
                    "method.decay=0.9998 method.start_epoch=25",
                    "method.decay=0.9998 method.start_epoch=12 method.weight=2.0",
                    "method.temperature=2.0 method.start_epoch=12",
                    "method.temperature=1.0 method.weight=1.0",
                    _QUARTER,
                    f"{_QUARTER} method.decay=0.9998",
                    "method.temperature=1.0 method.weight=3.0 method.start_epoch=12",
                    "method.temperature=1.0 method.weight=2.0 method.start_epoch=25",
                    _VIEW,
                    *(f"{_VIEW} method.weight={weight}" for weight in (0.3, 3.0)),
                    f"{_VIEW} method.batch_statistics=true",
                    *(f"{_VIEW} method.temperature=1.0 method.weight={w}" for w in (1.0, 3.0)),
                ],
                f"{RESNET}_mesa epochs=50 {_QUARTER}",
            ),
        ),
    ),
    "small": Study(
        "What MESA's teacher sees: 2,000 small images of CIFAR-10, 100 epochs",
        (
            "cifar10_small",
            "cifar10_small optimizer.weight_decay=0.005",
            *(
                f"cifar10_small method={name}"
                for name in ("sam", "saf", "saf_shuffled", "label_smoothing")
            ),
            *_changes(
                f"{_SMALL} {_UNMATCHED}",
                [
                    "method.weight=0.3",
                    "method.weight=0.3 method.batch_statistics=true",
                    f"method.weight=0.3 {_VIEW}",
                    f"method.weight=0.3 {_VIEW} method.batch_statistics=true",
                    _VIEW,
                    f"{_VIEW} method.batch_statistics=true",
                ],
            ),
            f"{_SMALL} {_VIEW} {_SPREAD}",
            *_changes(
                "cifar10_small method=mesa method.decay=0.9937 method.freeze_epoch=50",
                ["method.start_epoch=50"],
            ),
            "cifar10_small method=mesa method.decay=0.9937 method.freeze_epoch=30 "
            "method.start_epoch=30",
        ),
    ),
    "small_decayed": Study(
        "2,000 small images of CIFAR-10, 200 epochs, ten times the weight decay",
        (
            _DECAYED,
            *(
                f"{_DECAYED} method={name}"
                for name in ("sam", "saf", "saf_shuffled", "saf_uniform", "label_smoothing")
            ),
            f"{_DECAYED} method=saf method.lag=15",
            *(f"{_DECAYED} method=ema {how}method.decay=0.9995" for how in (f"{_VARIANCES} ", "")),
            *(
                f"{_DECAYED} method=mesa {_VARIANCES} method.decay=0.9937 {_VIEW} {match}"
                for match in (
                    *(_UNMATCHED, _SPREAD, f"{_SPREAD} method.weight=0.3"),
                    *(_NEAREST, f"{_NEAREST} method.weight=0.3", f"{_NEAREST} method.weight=0.1"),
                )
            ),
            *(
                f"{_DECAYED} method=mesa {_VARIANCES} method.decay=0.9995 {change}"
                for change in (
                    *(f"{_VIEW} {_NEAREST}", f"{_VIEW} {_NEAREST} method.weight=3.0"),
                    *(f"{_VIEW} {m} method.weight=0.3" for m in (_NEAREST, _SPREAD, _UNMATCHED)),
                    f"{_NEAREST} method.weight=0.3",
                )
            ),
            *(f"{_AVERAGED} {_VIEW} {_NEAREST}{weight}" for weight in ("", " method.weight=0.3")),
        ),
    ),
    "frozen": Study(
        "A teacher that stops half-way: 2,000 small images of CIFAR-10, 200 epochs",
        (
            _DECAYED,
            *(f"{_DECAYED} method={name}" for name in ("saf", "label_smoothing")),
            f"{_DECAYED} method=ema method.decay=0.9995",
            f"{_AVERAGED} {_VIEW} {_NEAREST}",
            *_changes(_AVERAGED, [_HALF]),
            *_changes(
                f"{_AVERAGED} method.freeze_epoch=100",
                [
                    *(_VIEW, _UNMATCHED),
                    f"method.weight=0.3 {_UNMATCHED}",
                    "method.weight=2.0",
                    _HALF,
                    *(f"{_HALF} {change}" for change in (_UNMATCHED, "method.weight=0.3")),
                    f"{_HALF} method.weight=2.0",
                ],
            ),
            f"{_DECAYED} method=mesa method.decay=0.9937",
            *_changes(
                f"{_DECAYED} method=mesa method.decay=0.9937 method.freeze_epoch=100",
                [_VIEW, "method.warmup=false", _HALF],
            ),
            f"{_AVERAGED} method.freeze_epoch=60 method.start_epoch=60",
            *_changes(f"{_AVERAGED} method.freeze_epoch=140", [_VIEW, _UNMATCHED]),
        ),
    ),
    "small_precision": Study(
        "float32: 2,000 small images of CIFAR-10, 200 epochs, ten times the weight decay",
        tuple(
            f"{_DECAYED} {method}precision=float32" for method in ("", "method=sam ", "method=saf ")
        ),
    ),
    "small_paper": Study(
        "As in the paper: 2,000 small images of CIFAR-10, 200 epochs, ten times the weight decay",
        (
            *(_DECAYED, f"{_DECAYED} method=saf"),
            f"{_DECAYED} method=saf method.tau_squared=false",
            *_changes(
                f"{_DECAYED} method=mesa {_VARIANCES} method.decay=0.9937 {_UNMATCHED}",
                ["method.warmup=false", _LETTER],
            ),
        ),
    ),
    "small_400": Study(
        "2,000 small images of CIFAR-10, 400 epochs",
        (
            "cifar10_small epochs=400",
            *_changes(
                f"{_SMALL} {_UNMATCHED} {_VIEW} epochs=400",
                ["method.weight=0.3", "method.weight=0.1"],
            ),
            f"{_SMALL} {_VIEW} {_SPREAD} epochs=400 method.weight=0.3",
        ),
    ),
    "digits": Study(
        "1,000 clean digits, 40 epochs",
        tuple(f"digits_noisy data.label_noise=0.0 {method}" for method in _DIGITS),
    ),
    "digits_noisy": Study(
        "1,000 digits, a fifth of the labels wrong, 40 epochs",
        tuple(f"digits_noisy {method}" for method in _DIGITS),
    ),
}
