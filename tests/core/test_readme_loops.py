"""The loops under "Use" in README.md train as they stand, on every torch that is declared."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

README = (Path(__file__).parents[2] / "README.md").read_text()
USE = re.search(r"^## Use\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]
LOOPS = re.findall(r"^```python\n(.*?)^```", USE, re.DOTALL | re.MULTILINE)
EPOCHS, CLASSES = 7, 100


def test_readme_has_a_loop_for_each_term():
    assert [term in loop for loop, term in zip(LOOPS, ["SAF(", "MESA("], strict=True)] == [True] * 2


@pytest.mark.parametrize("loop", LOOPS, ids=["SAF", "MESA"])
def test_readme_loop_trains_with_its_term(loop):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    train_set = TensorDataset(torch.randn(24, 6), torch.randint(CLASSES, (24,)))
    names = {
        "model": model,
        "train_set": train_set,
        "loader": DataLoader(train_set, 8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "epochs": EPOCHS,
        "num_classes": CLASSES,
        "DataLoader": DataLoader,
        "cross_entropy": cross_entropy,
        "torch": torch,
    }
    before = model[0].weight.detach().clone()
    exec(loop, names)
    assert names["epoch"] == EPOCHS - 1
    assert not torch.equal(model[0].weight, before)
    # The term is on in the last epochs, and never negative.
    assert names["loss"] > cross_entropy(names["logits"], names["y"])
