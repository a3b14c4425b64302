"""The training loop: one function, read from top to bottom, that knows no method by name.

Everything random depends on the config alone (the order and augmentation of an epoch on its seed
and number), or is in the checkpoint (torch's generators). So a run that was stopped anywhere, and
continued from its last checkpoint, ends with the weights of one that was not.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saltflat.train.augment import Share, TrainLoader
from saltflat.train.checkpoint import list_checkpoints, save_snapshot
from saltflat.train.config import Config
from saltflat.train.data import load_data
from saltflat.train.evaluate import TestSet, TrainingSharpness, accuracies
from saltflat.train.fast import build_steps, own_stream
from saltflat.train.files import to_json, write_text
from saltflat.train.folder import CONFIG, RESULT, check_folder
from saltflat.train.log import build_trackers, progress, read_metrics, write_metrics
from saltflat.train.provenance import provenance, train_command
from saltflat.train.ranks import ALONE, Asked, Ranks, device_of, joined
from saltflat.train.state import build, fingerprint


class Interrupted(Exception):  # noqa: N818 - nothing is wrong
    """Ctrl-C, or torchrun's wish: the step was finished and the run saved."""


@dataclass(frozen=True)
class Run:
    """What came of a run."""

    folder: Path
    accuracy: float
    """Of the model on the test set after the last epoch, in percent."""
    best_accuracy: float
    """Of its best epoch of those that were tested, which was chosen on the test set."""
    teacher_accuracy: float | None
    """Of the moving average after the last epoch, where there is one."""
    seconds: float
    """Spent in training steps."""
    images_per_second: float
    extra_bytes: int
    """What the method keeps between steps, beside the base optimizer, on one process."""
    sharpness: float
    """SAM's, rho 0.05, on up to 1024 training images as they are."""
    diverged: bool
    """Whether the last epoch's loss is not a number."""


def fit(
    config: Config, folder: Path | str, *, stop: Callable[[int, int], bool] | None = None
) -> Run:
    """Train, or go on with training, what a config says.

    Under torchrun, or where torch.distributed is initialised, all processes call it and train one
    model together. They must see one folder, which rank 0 writes.

    Args:
        config: The run.
        folder: Where the run is or will be: config.json, metrics.jsonl, checkpoints and, when it
            is complete, result.json. A folder that holds a run of this config is continued.
        stop: Asked after every step, with the epoch and the steps done in it, whether to save and
            stop there, as Ctrl-C does. Several processes stop a step later, if any was told to.

    Returns:
        The figures of the complete run.

    Raises:
        ValueError: If the config cannot be run, before any training, or the folder holds another;
            or if processes were given different ones.
        RuntimeError: If another process has stopped or hangs.
        Interrupted: If it was stopped; the run is saved.
    """
    with (
        joined(config) as ranks,
        stopping(ranks) as interrupted,
        own_stream(device_of(config)),
    ):
        asked = Asked(ranks)
        steps = running(
            config,
            Path(folder),
            lambda *at: asked(interrupted() or (stop is not None and stop(*at))),
            ranks=ranks,
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                run: Run = end.value
                return run


def running(
    config: Config,
    run: Path,
    stop: Callable[[int, int], bool],
    *,
    ranks: Ranks = ALONE,
    shown: bool = True,
) -> Generator[None, None, Run]:
    """`fit`, a step each time it is asked for one, so that several runs can take turns."""
    data = ranks.in_turn(lambda: load_data(config.data))
    share = Share(ranks.rank, ranks.size, config.optimizer.accumulate)
    loader = TrainLoader(data, config.data, config.seed, share)
    torch.manual_seed(config.seed)
    state, device = build(config, data, len(loader), ranks)
    check_folder(run, config)
    newest = [path.name for path in list_checkpoints(run)[:1]]
    ranks.agree({"the data's content": fingerprint(data), f"the checkpoint in {run}": newest})
    state.load(run, data)
    metrics = read_metrics(run)[: state.epoch]
    if len(metrics) < state.epoch:
        raise ValueError(f"{run} has lost figures of its {state.epoch} epochs: start it anew")
    trackers = build_trackers(config.log, run, dataclasses.asdict(config)) if ranks.first else []
    if ranks.first:
        run.mkdir(parents=True, exist_ok=True)
        write_text(run / CONFIG, to_json(dataclasses.asdict(config), indent=1))
        write_metrics(run, metrics)
    steps = build_steps(config, state, data, loader, device)
    test_set = TestSet(config, data, device, ranks)
    sharpness = TrainingSharpness(data, device)

    done = state.epoch * len(loader) + state.step
    with progress(config.epochs, len(loader), done, shown and ranks.first) as bar:
        while state.epoch < config.epochs:
            epoch = state.epoch
            if config.snapshot_every and epoch % config.snapshot_every == 0 and state.step == 0:
                weights = state.model.state_dict()
                if ranks.first:
                    save_snapshot(run, epoch, weights)
            state.training.set_epoch(epoch)
            state.model.train()
            begin = time.perf_counter()
            for _ in steps(epoch, state.step):
                state.schedule.step()
                state.step += 1
                bar.step(epoch, state.batch_size, state.figures)
                if stop(epoch, state.step):
                    state.seconds += time.perf_counter() - begin
                    state.save(run, len(loader), data)
                    raise Interrupted(run)
                yield
            means = state.figures()  # which waits for the device, so that the time is all of it
            state.seconds += time.perf_counter() - begin
            state.settle()
            figures_of_epoch = {
                **{name: total / ranks.size for name, total in ranks.sum(means).items()},
                "lr": float(state.training.optimizer.param_groups[0]["lr"]),
                "seconds": state.seconds,
            }
            if (epoch + 1) % config.evaluate_every == 0 or epoch + 1 == config.epochs:
                figures_of_epoch |= accuracies(config, test_set, state.models(), device)
                state.best = max(state.best, figures_of_epoch["accuracy"])
            if config.track_sharpness and (epoch + 1) % config.track_sharpness == 0:
                figures_of_epoch["sharpness"] = sharpness(state.model)
            metrics.append({"epoch": epoch, **figures_of_epoch})
            if ranks.first:
                write_metrics(run, metrics)
            for tracker in trackers:
                tracker.write(epoch, figures_of_epoch)
            state.epoch, state.step = epoch + 1, 0
            state.sums.zero_()
            if state.epoch % config.checkpoint_every == 0 or state.epoch == config.epochs:
                state.save(run, len(loader), data)
    last = metrics[-1]
    images = config.epochs * len(loader) * config.data.batch_size
    result = Run(
        folder=run,
        accuracy=last["accuracy"],
        best_accuracy=state.best,
        teacher_accuracy=last.get("teacher_accuracy"),
        seconds=state.seconds,
        images_per_second=images / max(state.seconds, 1e-9),
        extra_bytes=state.training.extra_bytes(),
        sharpness=sharpness(state.model),
        diverged=last["loss"] is None or not math.isfinite(last["loss"]),
    )
    if ranks.first:
        facts = provenance(train_command(config), device)
        write_text(run / RESULT, to_json({**dataclasses.asdict(result), **facts}))
    return result


@contextmanager
def stopping(ranks: Ranks = ALONE) -> Iterator[Callable[[], bool]]:
    """While entered, Ctrl-C is noted rather than raised; a second one is raised.

    Of several processes each is sent Ctrl-C by the terminal and, again, by torchrun, which sends
    SIGTERM too. None of these is raised, since all must save; torchrun kills what takes too long.
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if noted and not ranks.several:
            raise KeyboardInterrupt
        noted.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM) if ranks.several else (signal.SIGINT,)
    try:
        before = [(number, signal.signal(number, note)) for number in numbers]
    except ValueError:  # not in the main thread: nothing to catch there
        yield lambda: False
        return
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
