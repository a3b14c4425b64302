"""SAF or MESA in a loop as timm's train.py has it, on scikit-learn's digits.

All is timm's but the task, and for SAF the dataset around the dataset.

    pip install '.[timm]' scikit-learn
    python examples/timm_digits.py
    python examples/timm_digits.py --method mesa --model convnext_atto
    python examples/timm_digits.py --resume runs/timm_digits/last.pth.tar --epochs 12
"""

from __future__ import annotations

import argparse
from typing import Any

import timm
import torch
from digits import load
from timm.data import create_loader
from timm.optim import create_optimizer_v2
from timm.task import resume_task_checkpoint
from timm.utils import CheckpointSaver, get_outdir, random_seed
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.transforms.functional import to_pil_image

from saltflat import MESA, SAF, decay_for_half_life
from saltflat.integrations.timm import TrajectoryTask, indexed_targets


class Images(TensorDataset):
    """PIL images and labels, and a transform that create_loader sets, as of timm's datasets."""

    transform: Any = None

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.transform(to_pil_image(image).convert("RGB")), int(label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["saf", "mesa"], default="saf")
    defaults = {"model": "test_resnet", "epochs": 10, "resume": "", "out": "runs/timm_digits"}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    random_seed(0)  # of the weights
    train_set, x_test, y_test = load(0)
    train: Any = Images(*train_set.tensors)
    test: Any = Images(x_test, y_test)
    if args.method == "saf":
        train = indexed_targets(train)
    how: dict[str, Any] = {"input_size": (3, 32, 32), "batch_size": 50, "num_workers": 0}
    how |= {"device": torch.device("cpu"), "persistent_workers": False}
    loader = create_loader(train, is_training=True, hflip=0.0, scale=(0.6, 1.0), **how)
    tests = create_loader(test, is_training=False, crop_pct=1.0, **how)
    model = timm.create_model(args.model, num_classes=10)
    term: SAF | MESA = SAF(num_samples=len(train_set), num_classes=10)
    if args.method == "mesa":
        term = MESA(model, decay=decay_for_half_life(3.5, len(loader)), weight=0.3)
    task = TrajectoryTask(model, nn.CrossEntropyLoss(), term)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3)
    first = resume_task_checkpoint(task, args.resume, optimizer) if args.resume else 0
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=get_outdir(args.out), task=task)
    for epoch in range(first or 0, args.epochs):
        random_seed(epoch)  # of order and augmentation, so that a resumed run has the same
        task.train()
        task.set_epoch(epoch)
        for x, target in loader:
            result = task(x, target)
            optimizer.zero_grad()
            result["loss"].backward()
            optimizer.step()
            task.update_ema()
        task.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in tests)
        accuracy, term_loss = 100 * right / len(y_test), result["trajectory_loss"].item()
        saver.save_checkpoint(epoch, metric=accuracy)
        print(f"epoch {epoch}: trajectory loss {term_loss:.5f}, test accuracy {accuracy:.2f} %")


if __name__ == "__main__":
    main()
