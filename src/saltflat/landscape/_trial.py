"""Whether the quick way to the losses agrees with the plain one, tried before the work."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.landscape._evaluate import Places
from saltflat.landscape._moving import Loss
from saltflat.landscape.directions import Directions

TOLERANCE = (0.01, 0.02)
"""What losses in bfloat16 may differ from the model's own: absolutely, and in proportion."""


def tried(
    model: nn.Module,
    loss_fn: Loss,
    batches: list[tuple[Tensor, Tensor]],
    directions: Directions,
    settings: Mapping[str, Any],
    asked: str,
) -> tuple[Places, dict[str, Any]]:
    """What gives the losses, and how far these are from the model's, one weight at a time.

    Args:
        model: The model.
        loss_fn: Its loss.
        batches: On its device.
        directions: Where to.
        settings: Of the surface: span, batchnorm, and the precision to try.
        asked: The precision that was asked for: what is asked for by name is used in any case.
    """
    make = partial(Places, model, loss_fn, batches, directions, batchnorm=settings["batchnorm"])
    span = settings["span"]
    around = zip(directions.centre, directions.reach, strict=True)
    corners = [[centre - span * reach, centre + span * reach] for centre, reach in around]
    trial = [[0.0] * len(corners), list(directions.centre), *map(list, product(*corners))]
    at = torch.tensor(trial, dtype=torch.float64)
    expected = make(half=False, fold=False)(at)[:, 0].numpy()
    known = np.isfinite(expected)
    for half in (True, False) if settings["precision"] == "bf16" else (False,):
        places = make(half=half)
        places.record()
        away = np.nan_to_num(np.abs(places(at)[:, 0].numpy() - expected)[known], nan=inf)
        size = np.abs(expected[known])
        if asked == "bf16" or not half or (away <= TOLERANCE[0] + TOLERANCE[1] * size).all():
            break
    found = {
        "how": places.how,
        "origin_loss": float(expected[0]),
        "apart": {
            "absolute": float(away.max(initial=0.0)),
            "relative": float((away / np.maximum(size, 1e-12)).max(initial=0.0)),
            "where": "the origin, the middle and the corners",
            "from": "one weight at a time, in the model's precision",
        },
    }
    return places, found
