"""Train a small network on scikit-learn's digits, with and without SAF.

A fifth of the training labels is flipped, so that there is something to over-fit.

    python examples/digits.py
    python examples/digits.py --epochs 10 --seeds 1
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from saltflat import SAF, with_index

TRAIN, FLIPPED = 1000, 0.2


def load(seed: int) -> tuple[TensorDataset, Tensor, Tensor]:
    """1,000 images to train on, a fifth of them with a wrong label, and the rest to test on."""
    generator = torch.Generator().manual_seed(seed)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    labels = y[:TRAIN].clone()
    flip = torch.rand(TRAIN, generator=generator) < FLIPPED
    wrong = labels + torch.randint(1, 10, (TRAIN,), generator=generator)
    labels[flip] = wrong[flip] % 10
    return TensorDataset(x[:TRAIN], labels), x[TRAIN:], y[TRAIN:]


def network() -> nn.Module:
    def block(channels_in: int, channels: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels), nn.ReLU()]

    layers = [*block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(seed: int, epochs: int, use_saf: bool) -> float:
    """Test accuracy after the last epoch, in percent."""
    train_set, x_test, y_test = load(seed)
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loader = DataLoader(with_index(train_set), batch_size=64, shuffle=True, drop_last=True)
    saf = SAF(num_samples=len(train_set), num_classes=10)
    for epoch in range(epochs):
        saf.set_epoch(epoch)
        for index, x, y in loader:
            logits = model(x)
            loss = cross_entropy(logits, y)
            if use_saf:
                loss = loss + saf(logits, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) == y_test).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"digits: {TRAIN} training images, {FLIPPED:.0%} of labels flipped, {args.epochs} epochs")
    for name, use_saf in {"SGD": False, "SAF": True}.items():
        scores = torch.tensor([train(seed, args.epochs, use_saf) for seed in range(args.seeds)])
        listed = ", ".join(f"{score:.1f}" for score in scores)
        print(f"{name}: test accuracy {scores.mean():.1f} % after the last epoch (seeds: {listed})")
