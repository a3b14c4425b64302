"""The landscape command: surfaces of runs, in their folders and as pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from saltflat.cli.options import LandscapeOptions


def landscape(options: Namespace) -> None:
    from torch.nn.functional import cross_entropy

    from saltflat.landscape import loss_surface
    from saltflat.train.provenance import command, provenance
    from saltflat.train.runs import open_run

    own = LandscapeOptions(**{f.name: options[f.name] for f in fields(LandscapeOptions)})
    if own.figures is not None:  # now: a missing package fails before the work
        from saltflat.report.surfaces import draw
    runs = [open_run(folder, device=own.device) for folder in options.runs]
    if own.mode == "between" and (len(runs) != 2 or runs[0].config.model != runs[1].config.model):
        found = ", ".join(f"{run.folder} of {run.config.model}" for run in runs)
        raise ValueError(f"between is for two runs of one model, got {found}")
    shown = runs[:1] if own.mode == "between" else runs
    if own.out is not None and len(shown) > 1:
        raise ValueError(f"--out is for one surface, and there are {len(shown)}: leave it out")
    batchnorm = own.batchnorm or ("batch" if own.mode == "trajectory" else "eval")
    surfaces = {}
    for run in shown:
        ends = runs if own.mode == "between" else [run]
        title = " to ".join(f"{one.config.method.name}, seed {one.config.seed}" for one in ends)
        title = f"{title} ({run.folder})" if title in surfaces else title
        path = Path(own.out) if own.out else run.folder / _surface_name(own.mode, runs)
        facts = {
            "title": title,
            "model": run.config.model,
            "epochs": run.epochs,
            **provenance(command("saltflat", *options.arguments), run.device),
        }
        try:
            with _time_left(title) as progress:
                surfaces[title] = surface = loss_surface(
                    run.model,
                    cross_entropy,
                    run.batches(own.images),
                    points=own.points,
                    span=own.span,
                    directions=_directions(own, runs, run),
                    batchnorm=batchnorm,
                    precision=own.precision,
                    path=path,
                    facts=facts,
                    progress=progress,
                )
        except KeyboardInterrupt:
            print("stopped and saved; the same command goes on where it stopped")
            raise
        about = surface.provenance
        print(
            f"{path}: loss {about['origin_loss']:.4g} at the weights, {surface.losses.min():.4g} "
            f"to {surface.losses.max():.4g} around; {about['seconds']:.1f} s, {about['how']}"
        )
    if own.figures is not None:
        for picture in draw(surfaces, Path(own.figures), f"landscape_{own.mode}"):
            print(picture)


@contextmanager
def _time_left(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the points done and the time left; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("points"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _surface_name(mode: str, runs: list[Any]) -> str:
    """The file of a surface in a run's folder; the report reads that of a plane."""
    if mode == "between":
        return f"landscape_to_{runs[1].config.method.name}_seed{runs[1].config.seed}.npz"
    return "landscape.npz" if mode == "plane" else f"landscape_{mode}.npz"


def _directions(own: LandscapeOptions, runs: list[Any], run: Any) -> Any:
    from saltflat.landscape import line_between, random_directions, trajectory_plane
    from saltflat.train.checkpoint import load_snapshots

    if own.mode == "between":
        return line_between(*(one.model for one in runs))
    if own.mode == "trajectory":
        kept = load_snapshots(run.folder)
        try:
            return trajectory_plane(run.model, [kept[at] for at in kept if at < run.epochs])
        except ValueError as error:
            raise ValueError(f"{run.folder}: {error}") from error
    return random_directions(run.model, seed=own.seed, count=2 if own.mode == "plane" else 1)
