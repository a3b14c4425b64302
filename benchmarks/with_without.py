"""What each speed feature pays: SAF and MESA with and without it, as ratios from one run.

git archive --prefix=runs/before/ 4bad9d9 src | tar x                 # version 0.1
python benchmarks/with_without.py --before runs/before/src            # on a GPU
python benchmarks/with_without.py --before runs/before/src --dry      # tiny, on any machine
python benchmarks/hessian.py                                          # the row of the Hessian

Version 0.1 and this library run in a process each. Each process has its own base, the same training
step without a term. The processes take turns, and a row is compared with the base of its own
process in the same round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@dataclass(frozen=True)
class Work:
    """A column of the table."""

    model: str
    side: int
    classes: int
    batch: int
    samples: int
    steps: int
    captured: bool = False


RESNET18 = partial(Work, "cifar_resnet18", 32, 100, 128, 50_000)
COLUMNS = {
    "ResNet-18, 32 px, batch 128, compiled, captured": RESNET18(100, captured=True),
    "ResNet-18, 32 px, batch 128, eager": RESNET18(50),
    "ResNet-50, 224 px, batch 256, eager": Work("resnet50", 224, 1000, 256, 1_281_167, 10),
}
ROWS = {
    "before: base": "",
    "before: SAF, kernels": "saf",
    "before: SAF on the host": "saf host",
    "before: SAF on the host, prefetch": "saf host prefetch",
    "before: MESA": "mesa",
    "before: MESA, fold": "mesa fold",
    "before: MESA, fold and prefetch": "mesa fold prefetch",
    "before: average, kernel": "average",
    "base": "",
    "SAF": "saf",
    "SAF, torch.compile": "saf compile",
    "SAF on the host": "saf host",
    "MESA": "mesa",
    "MESA, fold": "mesa fold",
    "MESA, compiled teacher": "mesa compile",
    "average, _foreach_lerp_": "average",
}
"""Each row and what it adds to the base's step; "before" is version 0.1."""
SIMPLER = {
    "before: SAF, kernels": ("SAF", "SAF, torch.compile"),
    "SAF, torch.compile": ("SAF",),
    "before: SAF on the host, prefetch": ("before: SAF on the host", "SAF on the host"),
    "before: MESA, fold and prefetch": ("MESA, fold", "MESA, compiled teacher", "MESA"),
    "MESA, fold": ("MESA, compiled teacher", "MESA"),
    "before: average, kernel": ("average, _foreach_lerp_",),
}
"""Each feature, and the contenders with less code, the best of which it must beat."""


class Bench:
    """One column's steps in one process, with the library that this process imports."""

    def __init__(self, work: Work, *, before: bool, dry: bool) -> None:
        import saltflat
        from saltflat.train.models import build_model

        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.library: Any = saltflat
        self.work, self.before = work, before
        self.compiler: dict[str, Any] = {"backend": "eager"} if dry else {}
        # All rows train one model: only their speed is looked at.
        model: Any = build_model(work.model, num_classes=work.classes, image_size=work.side)
        self.model = model.to(DEVICE, memory_format=torch.channels_last)
        self.network: Any = torch.compile(model, **self.compiler) if work.captured else model
        rate: Any = torch.tensor(1e-4, device=DEVICE) if work.captured else 1e-4
        self.optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, fused=True)
        x = torch.randn(work.batch, 3, work.side, work.side, device=DEVICE)
        self.x = x.contiguous(memory_format=torch.channels_last)
        self.y = torch.randint(work.classes, (work.batch,), device=DEVICE)
        rows = torch.randperm(work.samples)[: 64 * work.batch]
        rows = rows.to(DEVICE) if work.captured else rows.pin_memory() if CUDA else rows
        self.indices = rows.split(work.batch)

    def term(self, kind: str, options: list[str]) -> Any:
        """A row's term, in an epoch with a loss."""
        if kind == "saf":
            where = {"device": "cpu"} if "host" in options else {}
            saf = self.library.SAF(self.work.samples, self.work.classes, **where)
            saf.set_epoch(2)
            for index in self.indices:  # which epoch 5 reads
                saf(torch.randn(self.work.batch, self.work.classes, device=DEVICE), index)
            saf.set_epoch(5)
            if "compile" in options:
                saf.compile(**self.compiler)
            return saf
        # Version 0.1 with the defaults of this one.
        how = {"warmup": False, "match": "none", "deviations": False} if self.before else {}
        mesa = self.library.MESA(self.model, **how)
        mesa.set_epoch(5)
        if "fold" in options:
            mesa.teacher.fold()
        if "compile" in options:
            mesa.teacher.module.compile(**self.compiler)
        return mesa

    def contender(self, row: str) -> Callable[[], None]:
        """A row's steps of a round; here the first ones compile, tune and capture."""
        kind, *options = row.split() or ["base"]
        term: Any = self.term(kind, options) if row else None

        def step(x: Tensor, y: Tensor, index: Tensor) -> None:
            self.optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA, cache_enabled=False):
                if "prefetch" in options:
                    term.prefetch(*((index, DEVICE) if kind == "saf" else (x,)))
                logits, extra = self.network(x), 0.0
                if kind in ("saf", "mesa"):
                    extra = term(logits, index if kind == "saf" else x)
            (cross_entropy(logits.float(), y) + extra).backward()
            self.optimizer.step()
            if kind in ("mesa", "average"):
                term.update(self.model)

        run_step: Callable[..., Any] = step
        if self.work.captured and not self.before:
            from saltflat.core.cuda_graph import GraphedStep

            run_step = GraphedStep(step, [p for p in (term, self.optimizer) if p is not None])
        elif self.work.captured and CUDA:
            run_step = self.captured_before(step, getattr(term, "teacher", None))
        order: Iterator[Tensor] = cycle(self.indices)

        def run(steps: int = self.work.steps) -> None:
            for index in islice(order, steps):
                run_step(self.x, self.y, index)
            if CUDA:
                torch.cuda.synchronize()

        run(5)
        return run

    def captured_before(self, step: Callable[..., None], teacher: Any) -> Callable[..., None]:
        """A step captured as version 0.1 does it."""
        from saltflat._capture import record  # type: ignore[import-not-found, unused-ignore]

        buffers = [self.x.clone(), self.y.clone(), self.indices[0].clone()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(*buffers)
            replay = record(lambda: step(*buffers), torch.cuda.graph_pool_handle())

        def run(*inputs: Tensor) -> None:
            torch._foreach_copy_(buffers, list(inputs), non_blocking=True)
            if teacher is not None:
                teacher.before_replay()
            replay()

        return run


def serve(pipe: Any, source: Path, before: bool, work: Work, dry: bool) -> None:
    """Build a column's rows, say which cannot run, then time those that are asked for."""
    sys.path.insert(0, str(source))
    bench = Bench(work, before=before, dry=dry)
    assert source in Path(bench.library.__file__).parents
    runs: dict[str, Any] = {}
    for name, row in ROWS.items():
        if name.startswith("before: ") == before and not (work.captured and "host" in row):
            try:
                runs[name] = bench.contender(row)
            except Exception as error:
                runs[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    pipe.send({name: run if isinstance(run, str) else None for name, run in runs.items()})
    while name := pipe.recv():
        begin = time.perf_counter()
        runs[name]()
        pipe.send(time.perf_counter() - begin)


def measure(sources: list[Path], work: Work, rounds: int, dry: bool) -> dict[str, Any]:
    """Each row's speeds by round, as ratios to the base's; or why it cannot run."""
    context, workers = multiprocessing.get_context("spawn"), []
    ratios: dict[str, Any] = {}
    for before, source in enumerate(sources):
        pipe, theirs = context.Pipe()
        given = (theirs, source, bool(before), work, dry)
        process = context.Process(target=serve, args=given, daemon=True)
        process.start()
        theirs.close()  # or a process that died would be waited for
        problems = pipe.recv()
        ratios |= {name: problem or [] for name, problem in problems.items()}
        workers.append((process, pipe, [name for name in problems if not problems[name]]))
    for number in range(1 + rounds):
        for _, pipe, names in workers:
            base = None
            for name in names:
                pipe.send(name)
                seconds = pipe.recv()
                base = base or seconds
                if number:  # the first round warms up
                    ratios[name].append(base / seconds)
    for process, pipe, _ in workers:
        pipe.send(None)
        process.join()
    return ratios


def cell(name: str, ratios: dict[str, Any]) -> str:
    """A row's speed in one column; of a feature also the points over the best simpler contender."""
    found = ratios.get(name, "")
    if isinstance(found, str):
        return found
    low, middle, high = quantiles(found, n=4, method="inclusive")
    simpler = [
        median(ratios[name]) for name in SIMPLER.get(name, ()) if isinstance(ratios.get(name), list)
    ]
    gain = f", {100 * (middle - max(simpler)):+.1f} points" if simpler else ""
    return f"{middle:.1%} ({low:.1%} to {high:.1%}){gain}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the sources of version 0.1")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="tiny sizes; the figures mean nothing")
    args = parser.parse_args()
    import record  # here, because it imports saltflat, which the processes choose themselves

    sources = [Path(__file__).resolve().parents[1] / "src"]
    sources += [args.before.resolve()] if args.before else []
    found = {}
    for title, work in COLUMNS.items():
        if args.dry:
            work = replace(work, side=32, classes=10, batch=4, samples=64, steps=1)
        found[title] = measure(sources, work, args.rounds, args.dry)
    heading = (
        f"Of the base's speed; median (quartiles) of n = {args.rounds} rounds; the points of a "
        "feature are over the best contender with less code:"
    )
    rows = [{"row": row} | {title: cell(row, found[title]) for title in COLUMNS} for row in ROWS]
    title = "Dry run: the figures mean nothing" if args.dry else "With and without, bf16"
    out = Path("runs") if args.dry else record.RESULTS
    record.write("with_without", title, {heading: rows}, out, found)
