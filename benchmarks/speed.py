"""How fast training is with each method, as ratios from one run: the table of the README.

python benchmarks/speed.py methods  # ResNet-18, 32 px, batch 128, recorded and compiled
python benchmarks/speed.py loop     # the README's loop, one operation at a time
python benchmarks/speed.py models   # every model of the paper's two accuracy tables
python benchmarks/speed.py seeds    # one to three seeds of a run side by side
python benchmarks/speed.py stores   # ImageNet's outputs on the GPU and in host memory
python benchmarks/speed.py profile  # the kernels that a method adds to a step
python benchmarks/speed.py merge --machine h200 --date 2026-11-15  # these as one result
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any

import record
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader, TensorDataset

from saltflat import SAF, with_index
from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig
from saltflat.train.bench import Row, bench, ready, timed_rounds
from saltflat.train.data import load_data
from saltflat.train.models import build_model
from saltflat.train.together import TURN, Turns

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Table = list[dict[str, Any]]
RAW: dict[str, Any] = {}
"""The seconds of every round, by what was measured."""
METHODS: dict[str, MethodConfig] = {
    "base": MethodConfig("base"),
    "saf": MethodConfig("saf"),
    "mesa": MethodConfig("mesa"),
    "msam": MethodConfig("msam"),
    "looksam": MethodConfig("looksam"),
    "esam": MethodConfig("esam"),
    "sam": MethodConfig("sam"),
    "asam": MethodConfig("asam"),
    "gsam": MethodConfig("gsam"),
}
MODELS = {
    "cifar_resnet18": (32, 100, 128),
    "cifar_resnet101": (32, 100, 128),
    "wrn28_10": (32, 100, 128),
    "pyramidnet110": (32, 100, 128),
    "resnet50": (224, 1000, 256),
    "resnet101": (224, 1000, 256),
    "resnet152": (224, 1000, 256),
    "vit_small_patch32_224": (224, 1000, 256),
}
"""Side of the images, classes and batch of each model of the paper's tables."""
IMAGENET = (1_281_167, 1000)


def work(model: str, *, compiled: bool, samples: int | None = None) -> Config:
    """Training of a model on images of its size that are made up."""
    side, classes, batch = MODELS[model]
    return Config(
        data=DataConfig(f"synthetic:{side}:{classes}:{samples or 8 * batch}", batch_size=batch),
        model=model,
        optimizer=OptimizerConfig(lr=1e-3),
        epochs=10_000,
        checkpoint_every=10_000,
        precision="bf16" if CUDA else "float32",
        channels_last=True,
        compile=compiled and CUDA,
    )


def lines(rows: list[Row]) -> Table:
    return [
        {
            "method": row.method,
            "images/s": f"{row.images_per_second:,.0f}",
            "of the base's speed": f"{row.ratio:.1%}",
            "quartiles": "{:.1%} to {:.1%}".format(*row.ratio_quartiles),
            "peak memory": "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f} MiB",
            "kept memory": f"{row.extra_bytes / 2**20:,.1f} MiB",
            "passes": f"{row.forward_passes:.3g} + {row.backward_passes:.3g}",
        }
        for row in rows
    ]


def recorded(names: list[str]) -> dict[str, Config]:
    """The work that methods are compared on."""
    one = work("cifar_resnet18", compiled=True, samples=50_000 if CUDA else 512)
    one = dataclasses.replace(one, data=dataclasses.replace(one.data, augment="basic"))
    return {name: dataclasses.replace(one, method=METHODS[name]) for name in names}


RECORDED = "cifar_resnet18, 32 px, batch 128, bf16, channels_last, compiled, a step one CUDA graph"


def methods(rounds: int, steps: int, names: list[str]) -> dict[str, Table]:
    """Every method on the same work."""
    rows = bench(recorded(names), rounds=rounds, steps=steps)
    RAW.update({row.method: row.seconds for row in rows})
    return {f"{RECORDED}, n = {rounds} x {steps} steps:": lines(rows)}


def profile(steps: int, names: list[str]) -> dict[str, Table]:
    """What the profiler sees of the same work: all kernels, and those that the base has not."""
    configs = recorded(names)
    data = load_data(configs[names[0]].data)
    seen: dict[str, dict[str, tuple[float, float]]] = {}
    table = []
    for name, config in configs.items():
        one = ready(config, data, steps)
        one.run()
        begin = time.perf_counter()
        one.run()
        spent = 1e6 * (time.perf_counter() - begin) / steps
        with torch.profiler.profile(
            activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]
        ) as found:
            one.run()
        kernels = {
            e.key: (e.device_time_total / steps, e.count / steps) for e in found.key_averages()
        }
        seen[name] = RAW[name] = kernels
        base = seen[names[0]]
        more = {
            k: (t - base.get(k, (0, 0))[0], c - base.get(k, (0, 0))[1])
            for k, (t, c) in kernels.items()
        }
        added = sorted(((t, c, k) for k, (t, c) in more.items() if c > 0), reverse=True)
        whole = [sum(part) for part in zip(*kernels.values(), strict=True)]
        table.append(
            {
                "method": name,
                "a step": f"{spent:,.0f} us",
                "its kernels": f"{whole[0]:,.0f} us in {whole[1]:.0f}",
                "more than the base": "; ".join(
                    f"{t:.1f} us, {c:.2g} x {_short(k)}" for t, c, k in added[:8]
                ),
            }
        )
        del one
    return {f"{RECORDED}, n = {steps} steps:": table}


def _short(kernel: str) -> str:
    """A kernel's name, without its types but with what a functor in them is called."""
    functor = re.search(r"(\w+Functor)", kernel)
    name = re.sub(r"<.*", "", kernel).split("::")[-1].removeprefix("void ")
    return f"`{name[:40]}{' ' + functor[1] if functor else ''}`"


def models(rounds: int, steps: int, names: list[str]) -> dict[str, Table]:
    """The paper's methods on the paper's models."""
    table = []
    for name in names:
        small = MODELS[name][0] == 32 and CUDA
        # Small images fit in numbers, and so epochs of a natural length.
        one = work(name, compiled=False, samples=50_000 if small else None)
        chosen = {key: METHODS[key] for key in ("base", "sam", "saf", "mesa")}
        configs = {key: dataclasses.replace(one, method=m) for key, m in chosen.items()}
        rows = {row.method: row for row in bench(configs, rounds=rounds, steps=steps)}
        RAW[name] = {key: row.seconds for key, row in rows.items()}
        side, _, batch = MODELS[name]
        table.append(
            {
                "model": name,
                "pixels": side,
                "batch": batch,
                "base, images/s": f"{rows['base'].images_per_second:,.0f}",
                **{key: f"{rows[key].ratio:.1%}" for key in ("sam", "saf", "mesa")},
            }
        )
        print(table[-1], flush=True)
        del rows
        if CUDA:
            torch.cuda.empty_cache()
    how = "bf16, channels_last, not compiled, every step one CUDA graph"
    return {f"Of the base's speed; {how}, n = {rounds} x {steps} steps:": table}


def loop(rounds: int, steps: int) -> dict[str, Table]:
    """The README's loop, line by line, without SAF and with it."""
    samples, batch = (50_000, 128) if CUDA else (64, 8)
    images = torch.randn(samples, 3, 32, 32)
    train_set = TensorDataset(images, torch.randint(100, (samples,)))

    def run(with_saf: bool) -> Iterator[None]:
        torch.manual_seed(0)
        model = build_model("cifar_resnet18", num_classes=100, in_channels=3, image_size=32)
        model = model.to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        saf = SAF(num_samples=len(train_set), num_classes=100)
        loader = DataLoader(
            with_index(train_set), batch, True, num_workers=4 if CUDA else 0, pin_memory=CUDA
        )
        for epoch in count(saf.start_epoch):
            saf.set_epoch(epoch)
            for index, x, y in loader:
                x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
                logits = model(x)
                loss = cross_entropy(logits, y)
                if with_saf:
                    loss = loss + saf(logits, index)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

    runs = {"base": run(False), "saf": run(True)}
    seconds = timed_rounds(
        {name: partial(_take, one, steps) for name, one in runs.items()}, rounds, time.perf_counter
    )
    text = f"The README's loop, float32, batch {batch}, 4 loader workers, one operation at a time, "
    return {text + f"n = {rounds} x {steps} steps:": _ratios(seconds, steps * batch)}


def seeds(rounds: int, turns: int) -> dict[str, Table]:
    """One to three seeds of a run, taking turns."""
    one = recorded(["base"])["base"]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Turns(dataclasses.replace(one, seed=seed), Path(folder, str(seed)), lambda *_: False)
            for seed in range(3)
        ]
        for run in runs:
            run.turn()

        def together(count: int) -> None:
            for _ in range(turns):
                for run in runs[:count]:
                    run.turn()
            _wait()

        contenders = {f"{n} at once": partial(together, n) for n in (1, 2, 3)}
        seconds = timed_rounds(contenders, rounds, time.perf_counter)
    RAW.update(seconds)
    images = turns * TURN * one.data.batch_size
    alone = median(seconds["1 at once"])
    table = [
        {
            "seeds": name,
            "images/s, all together": f"{n * images / median(spent):,.0f}",
            "of one alone": f"{n * alone / median(spent):.2f} x",
        }
        for n, (name, spent) in enumerate(seconds.items(), start=1)
    ]
    return {f"cifar_resnet18, base, n = {rounds} rounds of {turns} turns of {TURN} steps:": table}


def stores(rounds: int, steps: int, batches: list[int]) -> dict[str, Table]:
    """ResNet-50 with the outputs of ImageNet in different places."""
    from torchvision.models import resnet50

    samples, classes = IMAGENET if CUDA else (2000, 1000)
    side = 224 if CUDA else 32
    model = resnet50(num_classes=classes).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    tables = {}
    terms: dict[str, SAF | None] = {"none (base)": None}
    for storage in ("float16", "uint8"):
        for place, device in {"on the GPU": None, "in host memory": "cpu"}.items():
            terms[f"{storage}, {place}"] = SAF(samples, classes, storage=storage, device=device)
    for batch in batches:
        x = torch.randn(batch, 3, side, side, device=DEVICE)
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.randint(classes, (batch,), device=DEVICE)
        indices = torch.randperm(samples)[: 64 * batch].reshape(-1, batch)
        contenders = {
            name: partial(_store_step, model, optimizer, x, y, cycle(indices), steps, saf)
            for name, saf in terms.items()
        }
        for saf in terms.values():
            if saf is not None:
                _fill(saf, indices, torch.randn(batch, classes, device=DEVICE))
        seconds = timed_rounds(contenders, rounds, time.perf_counter)
        heading = f"ResNet-50, {side} px, batch {batch}, n = {rounds} x {steps} steps:"
        tables[heading] = _ratios(seconds, steps * batch)
        print(heading, tables[heading], flush=True)
    return tables


def _store_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    orders: Iterator[Tensor],
    steps: int,
    saf: SAF | None,
) -> None:
    for _ in range(steps):
        index = next(orders)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = model(x)
        loss = cross_entropy(logits.float(), y)
        if saf is not None:
            loss = loss + saf(logits, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _wait()


def _fill(saf: SAF, indices: Tensor, logits: Tensor) -> None:
    """Have references to read: write what is to be read, `lag` epochs before."""
    epoch = saf.start_epoch if saf.epoch is None else saf.epoch + 1
    saf.set_epoch(epoch)
    for index in indices:
        saf(logits, index)
    saf.set_epoch(epoch + saf.lag)


def _take(steps: Iterator[None], count: int) -> None:
    for _ in range(count):
        next(steps)
    _wait()


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def _ratios(seconds: dict[str, list[float]], images: int) -> Table:
    RAW[f"rounds of {images} images"] = seconds
    first = next(iter(seconds.values()))
    table = []
    for name, spent in seconds.items():
        ratios = torch.tensor([base / own for base, own in zip(first, spent, strict=True)])
        low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        table.append(
            {
                "contender": name,
                "images/s": f"{images / median(spent):,.0f}",
                "of the base's speed": f"{middle:.1%}",
                "quartiles": f"{low:.1%} to {high:.1%}",
            }
        )
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", choices=["methods", "profile", "loop", "models", "seeds", "stores", "merge"]
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument("--machine")
    parser.add_argument("--date")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Table]]] = {
        "methods": lambda: methods(args.rounds, args.steps, args.methods),
        "profile": lambda: profile(args.steps, args.methods),
        "loop": lambda: loop(args.rounds, args.steps),
        "models": lambda: models(args.rounds, args.steps, args.models),
        "seeds": lambda: seeds(args.rounds, args.steps),
        "stores": lambda: stores(args.rounds, args.steps, args.batches),
    }
    if args.part == "merge":
        record.merge("speed", args.machine, args.date, args.out)
    else:
        record.write(f"speed_{args.part}", "Speed", parts[args.part](), args.out, RAW)
