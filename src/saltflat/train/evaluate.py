"""What a trained model is worth: accuracy on the test set, sharpness on the training set."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat.sharpness import sam_sharpness
from saltflat.train.augment import test_batches
from saltflat.train.config import Config
from saltflat.train.data import Data


@torch.no_grad()
def accuracies(
    config: Config, data: Data, models: dict[str, nn.Module], device: torch.device
) -> dict[str, float]:
    """Of each model on the test set, in percent, by its name."""
    for model in models.values():
        model.eval()
    right, count = dict.fromkeys(models, 0), 0
    for images, labels in test_batches(data, max(config.data.batch_size, 256), config.data.workers):
        images, labels = images.to(device), labels.to(device)
        count += len(labels)
        for name, model in models.items():
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                right[name] += int((model(images).argmax(1) == labels).sum())
    return {name: 100 * hits / count for name, hits in right.items()}


def training_sharpness(data: Data, model: nn.Module, device: torch.device) -> float:
    """SAM's sharpness on training images without augmentation."""
    batches, seen = [], 0
    for x, y in test_batches(dataclasses.replace(data, test=data.train), 256):
        batches.append((x.to(device), y.to(device)))
        seen += len(y)
        if seen >= 1024:
            break
    return sam_sharpness(model, cross_entropy, batches)
