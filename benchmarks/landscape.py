"""How fast a loss surface is: several ways to the losses of many weights, and the whole of it.

The ways take turns, round after round, on the same places; each is compared with the first, the
loop that one would write. Then the surface is made by `loss_surface`, its start included.

    python benchmarks/landscape.py  # on a GPU; on a CPU, something small:
    python benchmarks/landscape.py --model small_cnn --points 6 --images 64 --each 2 --steps 30
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from saltflat.landscape import Directions, loss_surface, random_directions
from saltflat.landscape.grid import SurfaceEvaluator
from saltflat.train.bench import timed_rounds
from saltflat.train.models import build_model

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Way = Callable[[Tensor], Tensor]
"""From rows of coordinates to losses."""
Work = tuple[nn.Module, Tensor, Tensor, Directions]
RAW: dict[str, Any] = {}


def trained(name: str, images: int, steps: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in a minimum of its own: it has learnt some noise by heart."""
    torch.manual_seed(0)
    model = build_model(name, num_classes=100, in_channels=3, image_size=32).to(DEVICE)
    x = torch.randn(images, 3, 32, 32, device=DEVICE)
    y = torch.randint(100, (images,), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(images, (min(images, 128),), device=DEVICE)
        loss = cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval(), x, y


def loop(model: nn.Module, x: Tensor, y: Tensor, directions: Directions) -> Way:
    """What one would write: displace, compute, ask for the loss; one weight at a time."""
    weights = dict(model.named_parameters())

    @torch.no_grad()
    def losses(places: Tensor) -> Tensor:
        found = []
        for a, b in places.tolist():
            for name, weight in weights.items():
                moved = directions.origin[name]
                if name in directions.axes[0]:
                    moved = moved + a * directions.axes[0][name] + b * directions.axes[1][name]
                weight.copy_(moved)
            found.append(cross_entropy(model(x).float(), y).item())
        for name, weight in weights.items():
            weight.copy_(directions.origin[name])
        return torch.tensor(found)

    return losses


def mapped(count: int, model: nn.Module, x: Tensor, y: Tensor, directions: Directions) -> Way:
    """torch.func: so many stacked weights at a time, under vmap."""
    first, second = directions.axes
    still = {k: t for k, t in model.state_dict().items() if k not in first}

    def one(moved: dict[str, Tensor]) -> Tensor:
        return cross_entropy(functional_call(model, {**still, **moved}, (x,)).float(), y)

    @torch.no_grad()
    def losses(places: Tensor) -> Tensor:
        found = []
        for part in places.float().to(DEVICE).split(count):
            stacked = {}
            for name, weight in directions.origin.items():
                if name in first:
                    a, b = (c.view(-1, *[1] * weight.dim()) for c in part.T)
                    stacked[name] = weight + a * first[name] + b * second[name]
            found.append(vmap(one)(stacked).cpu())
        return torch.cat(found)

    return losses


def in_half(way: Way) -> Way:
    """In bf16, by autocast."""

    def losses(places: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):
            return way(places)

    return losses


def recorded(work: Work, half: bool, fold: bool = True) -> Way:
    """Saltflat's, with parts of it left out."""
    model, x, y, directions = work
    data = [(x, y)]
    how: dict[str, Any] = {"half": half, "fold": fold}
    evaluate = SurfaceEvaluator(model, cross_entropy, data, directions, batchnorm="eval", **how)
    evaluate(torch.zeros(4, 2))  # warm up and capture
    return lambda points: evaluate(points)[:, 0]


def ways(work: Work) -> dict[str, Callable[[], Way]]:
    """Every way, by what it is; the first is what the others are compared with."""
    model, x, y, directions = work
    last = x.contiguous(memory_format=torch.channels_last)

    def channels_last(compiled: bool) -> Way:
        copied = copy.deepcopy(model).to(memory_format=torch.channels_last)
        if compiled:
            copied.compile()
        return in_half(loop(copied, last, y, directions))

    return {
        "a loop, float32": lambda: loop(*work),
        "a loop, bf16, channels_last": lambda: channels_last(compiled=False),
        "a loop, bf16, channels_last, torch.compile": lambda: channels_last(compiled=True),
        "vmap over 4 weights, float32": lambda: mapped(4, *work),
        "vmap over 4 weights, bf16": lambda: in_half(mapped(4, *work)),
        "recorded, float32, folded": lambda: recorded(work, False),
        "recorded, bf16": lambda: recorded(work, True, fold=False),
        "recorded, bf16, folded": lambda: recorded(work, True),
    }


def compared(work: Work, names: list[str], rounds: int, each: int) -> list[dict[str, Any]]:
    """Seconds a place of each way, and how far its losses are from the first's."""
    found: dict[str, list[float]] = {}
    built = {name: way() for name, way in ways(work).items() if name in names}
    places = 2 * torch.rand(each, 2, generator=torch.Generator().manual_seed(0)) - 1
    places = places.double()

    def run(name: str) -> None:
        found[name] = built[name](places).double().tolist()

    seconds = timed_rounds({n: partial(run, n) for n in built}, rounds, time.perf_counter)
    first = next(iter(built))
    rows = []
    for name, spent in seconds.items():
        ratios = np.array(seconds[first]) / np.array(spent)
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
        apart = np.abs(np.array(found[name]) - np.array(found[first]))
        share = apart / np.abs(found[first])
        RAW[name] = {"seconds": spent, "losses": found[name]}
        rows.append(
            {
                "way": name,
                "a place": f"{1e3 * median(spent) / each:.3f} ms",
                "images/s": f"{len(work[1]) * each / median(spent):,.0f}",
                "speed": f"{middle:.2f} x",
                "quartiles": f"{low:.2f} to {high:.2f}",
                "losses differ by at most": f"{apart.max():.2g} ({share.max():.2%})",
            }
        )
    return rows


def whole(work: Work, points: int) -> list[dict[str, Any]]:
    """A surface as `saltflat landscape` makes it: the start, the check and the file included."""
    model, x, y, directions = work
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        path = Path(folder, "landscape.npz")
        surface = loss_surface(
            model, cross_entropy, [(x, y)], points=points, directions=directions, path=path
        )
        seconds = time.perf_counter() - begin
    RAW["whole"] = {"seconds": seconds, "losses": surface.losses.tolist(), **surface.provenance}
    return [
        {
            "grid": f"{points} x {points}",
            "images": len(x),
            "seconds": f"{seconds:.1f}",
            "how": surface.provenance["how"],
            "at its corners it differs by at most": "{absolute:.2g} ({relative:.2%})".format(
                **surface.provenance["difference"]
            ),
            "loss in the middle": f"{surface.provenance['origin_loss']:.4f}",
            "highest": f"{np.nanmax(surface.losses):.3g}",
        }
    ]


def profile(work: Work, name: str) -> None:
    """Print what a way's time goes to, by kernel."""
    way = ways(work)[name]()
    places = torch.zeros(8, 2, dtype=torch.float64)
    way(places)
    with torch.profiler.profile() as seen:
        way(places)
    by = "self_device_time_total" if CUDA else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=110))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cifar_resnet18")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=48, help="places of a way in a round")
    parser.add_argument("--steps", type=int, default=400, help="of training, before")
    parser.add_argument("--ways", nargs="+", help="of those in the table; all unless said")
    parser.add_argument("--profile", help="a way: print its kernels and nothing else")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    one = trained(args.model, args.images, args.steps)
    work = (*one, random_directions(one[0], seed=0))
    if args.profile is not None:
        profile(work, args.profile)
    else:
        names = args.ways or list(ways(work))
        surface = whole(work, args.points)
        print(surface, flush=True)
        rows = compared(work, names, args.rounds, args.each)
        each = median(RAW[names[0]]["seconds"]) / args.each
        surface[0][f"seconds of {names[0]}, by the table below"] = f"{args.points**2 * each:.1f}"
        what = f"{args.model}, 32 px, {args.images} images"
        number = f"n = {args.rounds} rounds of {args.each} places"
        sections = {
            f"`loss_surface` on {what}, from its call to its return, n = 1:": surface,
            f"The ways to the losses, {what}, speed against the first, {number}:": rows,
        }
        record.write("landscape", "Loss surfaces", sections, args.out, RAW)
