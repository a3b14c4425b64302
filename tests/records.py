"""Runs as they lie on disk, made up: what a report reads, without the training."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from saltflat.landscape import Surface
from saltflat.train import Config, DataConfig, MethodConfig
from saltflat.train.files import to_json

SMALL = Config(data=DataConfig(train_size=128, batch_size=32), epochs=3)


def write_run(folder, config=SMALL, *, gain=0.0, sharpness_every=0, complete=True, landscape=None):
    """A run whose curves follow from its seed, its epochs and a gain in accuracy."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(asdict(config)))
    noise = np.random.default_rng([config.seed, config.epochs, int(1000 * gain)])
    lines = []
    for epoch in range(config.epochs if complete else max(1, config.epochs // 2)):
        done = (epoch + 1) / config.epochs
        line = {
            "epoch": epoch,
            "loss": 2.3 * np.exp(-5 * done) + 0.001 * noise.random(),
            "accuracy": 90 * done**0.2 + gain + noise.random(),
        }
        if sharpness_every and (epoch + 1) % sharpness_every == 0:
            line["sharpness"] = 0.05 * (1.5 - done) + 0.01 * noise.random()
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(to_json(line) + "\n" for line in lines))
    if complete:
        result = {
            "accuracy": lines[-1]["accuracy"],
            "teacher_accuracy": None,
            "images_per_second": 1000.0 + config.seed,
            "extra_bytes": 2**20,
            "sharpness": 0.02,
        }
        (folder / "result.json").write_text(to_json(result))
    if landscape is not None:
        write_landscape(folder, **landscape)
    return folder


def write_landscape(folder: Path, *, curvature=4.0, points=21, epochs=None, **settings):
    """A bowl: half the curvature times the squared distance, and a little."""
    axis = np.linspace(-1, 1, points)
    losses = 0.05 + curvature / 2 * (axis[:, None] ** 2 + 2 * axis**2)
    about = {
        "settings": {"kind": "random", **settings},
        "command": "saltflat landscape c/*/seed0",
        "epochs": epochs,
    }
    surface = Surface(axis, axis, losses, None, np.zeros((1, 2)), about, losses.size)
    surface.save(folder / "landscape.npz")
    middle = losses[points // 2]
    line = Surface(axis, None, middle, None, np.zeros((1, 1)), about, points)
    line.save(folder / "landscape_line.npz")


def with_method(name, config=SMALL, seed=0, **settings):
    return replace(config, method=MethodConfig(name, settings), seed=seed)


def write_comparison(folder, config=SMALL, methods=("base", "sam"), seeds=2, **kwargs):
    """Runs and the summary of them, as `saltflat compare` leaves them."""
    rows = []
    for place, name in enumerate(methods):
        runs = [
            write_run(
                folder / name / f"seed{seed}",
                with_method(name, config, seed),
                gain=float(place),
                **(kwargs if seed == config.seed else {**kwargs, "landscape": None}),
            )
            for seed in range(config.seed, config.seed + seeds)
        ]
        ends = [json.loads((run / "result.json").read_text())["accuracy"] for run in runs]
        interval = {"mean": float(np.mean(ends)), "low": min(ends) - 1, "high": max(ends) + 1}
        difference = {"mean": float(place), "low": place - 0.5, "high": place + 0.5, "n": seeds}
        rows.append(
            {
                "method": name,
                "accuracy": {**interval, "n": seeds},
                "best": max(ends),
                "teacher": 91.5 if name == "mesa" else None,
                "difference": None if place == 0 else difference,
                "images_per_second": 5000.0 / (1 + place),
                "speed": 1 / (1 + place),
                "extra_bytes": place * 2**20,
                "sharpness": 0.02 / (1 + place),
                "epochs": config.epochs,
            }
        )
    summary = {
        "provenance": {
            "hardware": "one processor",
            "versions": "torch 2",
            "command": "saltflat compare --epochs=3",
            "date": "2026-01-01",
        },
        "config": asdict(config),
        "rows": rows,
        "verdicts": [f"{name}: better than base" for name in methods[1:]],
    }
    (folder / "summary.json").write_text(to_json(summary))
    return folder
