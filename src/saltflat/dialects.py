"""MESA as other repositories have it, in the settings of this one.

All of them pull the model's outputs to those of its moving average, and they differ in four things:

- the temperature T of the two distributions;
- the factor before the divergence, of which T squared may be a part (`tau_squared`);
- KL(teacher || model) or the cross-entropy between them, which is the same plus the teacher's
  entropy: a number that the model cannot change, and so no part of the gradient;
- when it starts, often after a share of the training.
"""

from __future__ import annotations

from typing import Any


def mesa_dialect(name: str, epochs: int) -> dict[str, Any]:
    """Settings with which MESA takes the steps that other code takes.

    Args:
        name: "paper": the paper's equations, without T squared. "released": the authors' code, with
            it; the defaults of `MESA` but for `warmup`, `deviations`, `match`. "cross_entropy": the
            cross-entropy at temperature 1 with weight 1 from a quarter of the training on.
            "fastervit": 50 KL at temperature 3 with weight 0.25, as FasterViT's train.sh has it.
        epochs: How long the training is.

    Returns:
        Arguments for `MESA`. Where a dialect leaves the decay to its user there is none.

    Raises:
        ValueError: If there is no such dialect.

    Example:
        >>> mesa_dialect("cross_entropy", epochs=300)["start_epoch"]
        75
    """
    paper = {"weight": 0.8, "temperature": 5.0, "decay": 0.9995, "start_epoch": 5}
    dialects: dict[str, dict[str, Any]] = {
        "paper": {**paper, "tau_squared": False},
        "released": {**paper, "tau_squared": True},
        "cross_entropy": {
            "weight": 1.0,
            "temperature": 1.0,
            "tau_squared": False,
            "start_epoch": epochs // 4,
        },
        "fastervit": {
            "weight": 50 * 0.25,
            "temperature": 3.0,
            "tau_squared": False,
            "decay": 0.9998,
            "start_epoch": epochs // 4 + 1,
        },
    }
    if name not in dialects:
        raise ValueError(f"unknown dialect {name!r}: there are {', '.join(dialects)}")
    return {**dialects[name], "warmup": False, "deviations": False, "match": "none"}
