"""SAF in Lightning, on scikit-learn's digits with a fifth of the labels wrong.

The LightningModule is an ordinary one; SAF is a callback, and the index is in the loader.

    pip install '.[lightning]' scikit-learn
    python examples/lightning_digits.py
    python examples/lightning_digits.py --method mesa --epochs 10
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from digits import load, network
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from saltflat import decay_for_half_life, with_index
from saltflat.integrations.lightning import MESACallback, SAFCallback, SharpnessCallback


class Digits(LightningModule):
    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.net = network()
        self.epochs = epochs

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        return [sgd], [torch.optim.lr_scheduler.CosineAnnealingLR(sgd, self.epochs)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["base", "saf", "mesa"], default="saf")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="runs/lightning_digits")
    args = parser.parse_args()
    seed_everything(0)
    train_set, x_test, y_test = load(0)
    data = with_index(train_set) if args.method == "saf" else train_set
    train = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(x_test, y_test), batch_size=len(x_test))
    callbacks: list[Callback] = [SharpnessCallback()]
    if args.method == "saf":
        callbacks.append(SAFCallback(num_samples=len(train_set), num_classes=10))
    elif args.method == "mesa":
        callbacks.append(MESACallback(decay=decay_for_half_life(3.5, len(train)), weight=0.3))
    trainer = Trainer(max_epochs=args.epochs, callbacks=callbacks, default_root_dir=args.out)
    trainer.fit(Digits(args.epochs), train, test)
    metrics = {name: f"{value:.4f}" for name, value in trainer.callback_metrics.items()}
    print(f"{args.method}, {args.epochs} epochs, after the last: {metrics}")


if __name__ == "__main__":
    main()
