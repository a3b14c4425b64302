"""SAF in an Accelerate loop that can be stopped and taken up, on scikit-learn's digits.

A fifth of the training labels is wrong. Every epoch is saved in a folder of its own.

    pip install '.[accelerate]' scikit-learn
    python examples/accelerate_digits.py
    python examples/accelerate_digits.py --resume runs/accelerate_digits/9
    torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import load, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from saltflat import SAF, with_index
from saltflat.integrations.accelerate import register


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", help="a saved epoch's folder, after which to go on")
    parser.add_argument("--out", default="runs/accelerate_digits")
    args = parser.parse_args()
    set_seed(0)
    # First, since it starts torch.distributed; without a GPU it must be told to.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train_set, x_test, y_test = load(0)
    saf = register(accelerator, SAF(num_samples=len(train_set), num_classes=10))
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    batches = DataLoader(with_index(train_set), batch_size=64, shuffle=True, drop_last=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, args.epochs * len(batches))
    model, optimizer, loader, scheduler = accelerator.prepare(net, sgd, batches, schedule)
    first = 0
    if args.resume:
        accelerator.load_state(args.resume)
        first = (saf.epoch or 0) + 1
    for epoch in range(first, args.epochs):
        model.train()
        saf.set_epoch(epoch)
        for index, x, y in loader:
            logits = model(x)
            term = saf(logits, index)
            accelerator.backward(cross_entropy(logits, y) + term)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.save_state(f"{args.out}/{epoch}")
        model.eval()
        with torch.no_grad():
            right = model(x_test.to(accelerator.device)).argmax(1).cpu() == y_test
        accelerator.print(
            f"epoch {epoch}, {accelerator.num_processes} process(es): trajectory loss "
            f"{term.item():.5f}, test accuracy {100 * right.float().mean().item():.2f} %"
        )


if __name__ == "__main__":
    main()
