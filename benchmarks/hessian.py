"""The Hessian's top eigenvalue and trace, by Saltflat and by curvlinops.

Both see the same rows of a synthetic data set, in evaluation mode and float32 without TF32. Each
round takes both in turn; a ratio is curvlinops' time divided by Saltflat's in the same round. Time
on a CPU is processor time, so that other work on the machine counts less.
Saltflat's own code goes if the figures agree and the ratios for ResNet-18 on an H200 are at most
1.5.

    python benchmarks/hessian.py
    python benchmarks/hessian.py --model small --size 16 --rounds 5
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import record
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from saltflat.sharpness import hessian_trace, top_eigenvalues
from saltflat.sharpness.objective import open_objective
from saltflat.train.models import build_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its dependencies
    import curvlinops  # type: ignore[import-untyped]

TOLERANCE = 1e-3
Batches = list[tuple[Tensor, Tensor]]
Outcome = dict[str, Any]
"""A value, the products it took and what else there is to report."""


def problem(name: str, args: argparse.Namespace) -> tuple[nn.Module, Batches]:
    """A model after a few steps on noisy class means, and batches of other rows."""
    torch.manual_seed(0)
    model = build_model("small_cnn" if name == "small" else name, num_classes=10).to(args.device)
    means = torch.randn(10, 3, args.size, args.size)

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (rows,))
        x = means[y] + 4 * torch.randn(rows, 3, args.size, args.size)
        return x.to(args.device), y.to(args.device)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(args.steps):
        x, y = batch(min(args.batch, args.images))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    sizes = [len(part) for part in torch.arange(args.images).split(args.batch)]
    return model.eval(), [batch(rows) for rows in sizes]


def operator(model: nn.Module, batches: Batches) -> Any:
    return curvlinops.HessianLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        batches,
        check_deterministic=False,
        num_data=sum(len(y) for _, y in batches),
    )


def ours_product(model: nn.Module, batches: Batches, vector: Tensor) -> Outcome:
    with open_objective(model, cross_entropy, batches, "eval") as objective, objective.at():
        return {"vector": objective.products(vector[None])[0], "products": 1}


def theirs_product(model: nn.Module, batches: Batches, vector: Tensor) -> Outcome:
    return {"vector": operator(model, batches) @ vector, "products": 1}


def ours_top(model: nn.Module, batches: Batches) -> Outcome:
    found = top_eigenvalues(model, cross_entropy, batches, tolerance=TOLERANCE)
    return {"value": found.values[0], "products": found.hvps, "converged": found.converged}


def theirs_top(model: nn.Module, batches: Batches) -> Outcome:
    matrix, calls = operator(model, batches).to_scipy(), []

    def matvec(vector: Any) -> Any:
        calls.append(1)
        return matrix @ vector

    counted = LinearOperator(matrix.shape, matvec=matvec, dtype=matrix.dtype)
    values = eigsh(counted, k=1, which="LA", tol=TOLERANCE, return_eigenvectors=False)
    return {"value": float(values[0]), "products": len(calls)}


def ours_trace(model: nn.Module, batches: Batches, hvps: int) -> Outcome:
    found = hessian_trace(model, cross_entropy, batches, hvps=hvps)
    interval = [found.interval.low, found.interval.high]
    return {"value": found.value, "products": found.hvps, "interval": interval}


def theirs_trace(model: nn.Module, batches: Batches, hvps: int) -> Outcome:
    torch.manual_seed(0)
    value = curvlinops.hutchpp_trace(operator(model, batches), hvps)
    return {"value": float(value), "products": hvps}


def timed(call: Callable[[], Outcome], device: torch.device) -> tuple[float, Outcome]:
    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    begin = now()
    outcome = call()
    return now() - begin, outcome


def difference(ours: Outcome, theirs: Outcome) -> float:
    """Relative to curvlinops' figure."""
    if "vector" in ours:
        return float((ours["vector"] - theirs["vector"]).norm() / theirs["vector"].norm())
    return abs(ours["value"] - theirs["value"]) / abs(theirs["value"])


def measure(
    model_name: str, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each quantity, and the raw times and figures."""
    model, batches = problem(model_name, args)
    vector = torch.randn(sum(p.numel() for p in model.parameters())).to(args.device)
    pairs: dict[str, tuple[Callable[[], Outcome], Callable[[], Outcome]]] = {
        name: (partial(ours, model, batches, *more), partial(theirs, model, batches, *more))
        for name, ours, theirs, more in (
            ("one product", ours_product, theirs_product, (vector,)),
            ("top eigenvalue", ours_top, theirs_top, ()),
            ("trace", ours_trace, theirs_trace, (args.products,)),
        )
    }
    for call in pairs["one product"]:
        call()  # warm up
    rows, raw = [], []
    for name, (ours, theirs) in pairs.items():
        rounds = [[timed(call, args.device) for call in (ours, theirs)] for _ in range(args.rounds)]
        ratios = sorted(t / o for (o, _), (t, _) in rounds)
        (_, own), (_, other) = rounds[-1]
        rows.append(
            {
                "quantity": name,
                "Saltflat": shown(own),
                "curvlinops": shown(other),
                "relative difference": f"{difference(own, other):.1e}",
                "products": f"{own['products']} and {other['products']}",
                "seconds": " and ".join(f"{median(r[i][0] for r in rounds):.3g}" for i in (0, 1)),
                "ratio": f"{median(ratios):.2f}",
                "lowest to highest": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            }
        )
        figures = [{k: v for k, v in one.items() if k != "vector"} for one in (own, other)]
        seconds = [[one[0] for one in pair] for pair in rounds]
        raw.append({"quantity": name, "figures": figures, "seconds": seconds})
    return rows, raw


def shown(outcome: Outcome) -> str:
    if "interval" in outcome:
        low, high = outcome["interval"]
        return f"{outcome['value']:.5g} [{low:.5g}, {high:.5g}]"
    return f"{outcome['value']:.5g}" if "value" in outcome else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", default=["cifar_resnet18"], help="Names of models, or small."
    )
    parser.add_argument("--size", type=int, default=32, help="Pixels.")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="Training steps before.")
    parser.add_argument("--products", type=int, default=30, help="For the trace.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    warnings.filterwarnings("ignore", category=FutureWarning)
    clock = "processor time" if args.device.type == "cpu" else "time"
    sections, raw = {}, {}
    for name in args.model:
        rows, raw[name] = measure(name, args)
        heading = (
            f"{name}, {args.size} px, {args.images} images in batches of {args.batch}, float32, "
            f"eager, {torch.get_num_threads()} CPU threads, curvlinops "
            f"{version('curvlinops-for-pytorch')}, n = {args.rounds} rounds. Ratio: curvlinops' "
            f"{clock} / Saltflat's in the same round; seconds and ratios are medians:"
        )
        sections[heading] = rows
    record.write("hessian", "The Hessian by two libraries", sections, args.out, raw)
