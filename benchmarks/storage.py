"""What each storage of SAF's outputs takes, and what it does to the gradient.

Fidelity is measured in a real training run: the trajectory loss's
gradient with references as stored, against the gradient with the float32 references, as the cosine
between the two, by the logits (of an epoch's first 50 batches, as one vector) and by the network's
parameters (the least of those batches).

    python benchmarks/storage.py                          # scikit-learn's digits
    python benchmarks/storage.py --data cifar100.npz      # x_train: (n, h, w, 3) uint8, y_train
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, pad

from saltflat import SAF, trajectory_loss
from saltflat.memory import CODECS

MIB = 2**20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bytes_table() -> list[dict[str, Any]]:
    sets = {"CIFAR-100": (50_000, 100), "ImageNet-1k": (1_281_167, 1000)}
    rows = []
    for name, (samples, classes) in sets.items():
        slots = 4  # lag + 1
        plain = slots * samples * classes * 4
        for storage in CODECS:
            total = SAF.estimate_bytes(samples, classes, storage=storage)
            stamps = 4 * (slots * samples + 1)
            rows.append(
                {
                    "training set": name,
                    "storage": storage,
                    "outputs, MiB": f"{(total - stamps) / MIB:,.0f}",
                    "stamps, MiB": f"{stamps / MIB:,.1f}",
                    "of float32 outputs": f"{total / plain:.1%}",
                }
            )
    return rows


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), conv(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def conv(channels_in: int, channels: int) -> nn.Module:
    layer = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(channels), nn.ReLU())


def network(channels: int, classes: int, width: int) -> nn.Module:
    """A small residual network of nine layers."""
    return nn.Sequential(
        *(conv(channels, width), conv(width, 2 * width), nn.MaxPool2d(2), Residual(2 * width)),
        *(conv(2 * width, 4 * width), nn.MaxPool2d(2), Residual(4 * width)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)),
    )


def load(path: Path | None) -> tuple[Tensor, Tensor]:
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(
            digits.target
        )
    with np.load(path) as arrays:
        images = torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2)
        return images.float() / 255 - 0.5, torch.from_numpy(arrays["y_train"]).long()


def cropped(x: Tensor) -> Tensor:
    """Padded by an eighth, cropped at random (once for the batch) and perhaps flipped."""
    size = x.shape[-1]
    left, top = torch.randint(size // 4 + 1, (2,)).tolist()
    x = pad(x, [size // 8] * 4)[..., top : top + size, left : left + size]
    return x.flip(-1) if size > 8 and torch.rand(()) < 0.5 else x


def gradients(
    model: nn.Module, logits: Tensor, reference: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the trajectory loss, by the logits and by the parameters, each as one vector."""
    loss = trajectory_loss(logits, reference, valid=valid)
    by_logits, *by_parameters = torch.autograd.grad(
        loss, [logits, *model.parameters()], retain_graph=True
    )
    return by_logits.flatten(), torch.cat([g.flatten() for g in by_parameters])


def fidelity_table(
    data: Path | None, epochs: int, width: int, batch_size: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    images, labels = (tensor.to(DEVICE) for tensor in load(data))
    classes = int(labels.max()) + 1
    model = network(images.shape[1], classes, width).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    saf = SAF(len(images), classes, storage="float32", device=DEVICE)
    measured = {saf.start_epoch, (saf.start_epoch + epochs) // 2, epochs - 1}
    rows = []
    for epoch in range(epochs):
        saf.set_epoch(epoch)
        by_logits: dict[str, list[Tensor]] = {name: [] for name in CODECS}
        by_parameters: dict[str, list[float]] = {name: [] for name in CODECS}
        right = 0
        for step, index in enumerate(torch.randperm(len(images)).split(batch_size)):
            x, y = cropped(images[index.to(DEVICE)]), labels[index.to(DEVICE)]
            logits = model(x)
            right += int((logits.argmax(1) == y).sum())
            if epoch in measured and step < 50:
                reference, valid = saf.memory.read(index.to(DEVICE), DEVICE)
                exact = gradients(model, logits, reference, valid)
                for name, codec in CODECS.items():
                    stored = codec.decode(codec.encode(reference))
                    rough = gradients(model, logits, stored, valid)
                    by_logits[name].append(torch.stack([exact[0], rough[0]]))
                    pair = exact[1].double(), rough[1].double()
                    by_parameters[name].append(cosine_similarity(*pair, dim=0).item())
            loss = cross_entropy(logits, y) + saf(logits, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if epoch in measured:
            accuracy = 100 * right / len(images)
            for name in CODECS:
                exact_all, rough_all = torch.cat(by_logits[name], 1).double()
                cosine = cosine_similarity(exact_all, rough_all, dim=0).item()
                rows.append(
                    {
                        "epoch": f"{epoch} of {epochs}",
                        "training accuracy": f"{accuracy:.1f} %",
                        "storage": name,
                        "cosine by logits": f"{cosine:.6f}",
                        "cosine by parameters": f"{min(by_parameters[name]):.6f}",
                        "batches": len(by_parameters[name]),
                    }
                )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    name = args.data.stem if args.data else "digits"
    sections = {
        "Bytes, lag 3:": bytes_table(),
        f"Fidelity on {name}, a nine-layer residual network of width {args.width}, one run:": (
            fidelity_table(args.data, args.epochs, args.width, args.batch_size)
        ),
    }
    record.write(f"storage_{name}", "Storing SAF's outputs: bytes and fidelity", sections, args.out)
