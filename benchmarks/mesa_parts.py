"""Why MESA gains or loses: what its teacher is made of, and how hard it pulls.

A model is trained with each setting. After some epochs, on the same training images:

- the share of the random initialisation in the teacher, which is the product of the decays;
- the accuracy of the model and of its teacher, and of the teacher with BatchNorm statistics of its
  own, estimated anew from training images, instead of the average of the model's;
- the norm of the term's gradient, as a share of the cross-entropy's, and the cosine between them.

    python benchmarks/mesa_parts.py --data cifar100.npz --model cifar_resnet18 --augment basic \
        --batch 128 --epochs 30 --at 5 8 15 30
"""

from __future__ import annotations

import argparse
import copy
from itertools import islice
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from saltflat.mesa import MESA
from saltflat.train import Config, DataConfig, MethodConfig
from saltflat.train.augment import TrainLoader
from saltflat.train.data import Data, load_data
from saltflat.train.evaluate import TestSet, accuracies
from saltflat.train.fast import build_steps, own_stream
from saltflat.train.ranks import device_of
from saltflat.train.state import State, build

CUDA = torch.cuda.is_available()
SETTINGS: dict[str, dict[str, Any]] = {
    "released code: 0.8, T = 5, T^2, no warm-up": {"warmup": False},
    "equations: 0.8, T = 5, no warm-up": {"tau_squared": False, "warmup": False},
    "0.8, T = 5, T^2": {},
    "0.8, T = 5": {"tau_squared": False},
    "1, T = 1": {"weight": 1.0, "temperature": 1.0},
}


def work(args: argparse.Namespace, settings: dict[str, Any]) -> Config:
    return Config(
        data=DataConfig(args.data, augment=args.augment, batch_size=args.batch),
        model=args.model,
        method=MethodConfig("mesa", settings),
        epochs=args.epochs,
        precision="bf16" if CUDA else "float32",
        channels_last=CUDA,
        compile=CUDA,
    )


def measure(args: argparse.Namespace, name: str, data: Data) -> list[dict[str, Any]]:
    config = work(args, SETTINGS[name])
    device = device_of(config)
    loader = TrainLoader(data, config.data, config.seed)
    torch.manual_seed(config.seed)
    state, _ = build(config, data, len(loader))
    tests = TestSet(config, data, device)
    rows = []
    with own_stream(device):
        steps = build_steps(config, state, data, loader, device)
        for epoch in range(max(args.at)):
            state.training.set_epoch(epoch)
            state.model.train()
            for _ in steps(epoch, 0):
                state.schedule.step()
            if epoch + 1 in args.at:
                rows.append(
                    {"setting": name, "epochs": epoch + 1, **parts(config, state, loader, tests)}
                )
                print(rows[-1], flush=True)
    return rows


def parts(config: Config, state: State, loader: TrainLoader, tests: TestSet) -> dict[str, Any]:
    mesa = state.training.term
    assert isinstance(mesa, MESA)
    device = device_of(config)
    batches = [b.images.to(device) for b in islice(loader.batches(0, 0), 20)]
    labels = [b.labels.to(device) for b in islice(loader.batches(0, 0), 20)]
    own = recalibrated(mesa.teacher.module, batches)
    models = {"model": state.model, "teacher": mesa.teacher, "own statistics": own}
    found = accuracies(config, tests, models, device)
    loss, term = gradients(state.model, mesa, batches[0], labels[0])
    return {
        "initialisation": f"{initialisation(mesa):.1%}",
        **{name: f"{share:.2f}" for name, share in found.items()},
        "gradient": f"{float(term.norm() / loss.norm()):.2f}",
        "cosine": f"{float(torch.dot(term, loss) / (term.norm() * loss.norm())):.2f}",
    }


def initialisation(mesa: MESA) -> float:
    """The share of the first weights in the teacher's, after its updates."""
    teacher, share = mesa.teacher, 1.0
    for t in range(teacher.updates):
        share *= min(teacher.decay, (1 + t) / (10 + t)) if teacher.warmup else teacher.decay
    return share


@torch.no_grad()
def recalibrated(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """A copy whose BatchNorm statistics are the means over some batches of its own activations."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the plain mean
    model.train()
    for x in batches:
        model(x)
    return model.eval()


def gradients(model: nn.Module, mesa: MESA, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of the cross-entropy and of the term, on a batch; the model's statistics stay."""
    model = copy.deepcopy(model).train()
    logits = model(x)
    losses = cross_entropy(logits, y), mesa(logits, x)
    weights = list(model.parameters())
    loss, term = (
        torch.cat([g.flatten() for g in torch.autograd.grad(one, weights, retain_graph=True)])
        for one in losses
    )
    return loss, term


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--augment", default="none")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=40, help="Of the schedule.")
    parser.add_argument("--at", type=int, nargs="+", default=[6, 10, 20, 40])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    data = load_data(work(args, {}).data)
    rows = [row for name in args.settings for row in measure(args, name, data)]
    stem = Path(args.data).stem
    heading = f"{stem}, {args.model}, a schedule of {args.epochs} epochs, one seed:"
    record.write(f"mesa_parts_{stem}", "MESA's parts", {heading: rows}, args.out)
