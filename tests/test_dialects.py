"""Each dialect, as it is written elsewhere, has MESA's gradient with the dialect's settings."""

import inspect

import pytest
import torch
from problems import CLASSES, FEATURES
from torch import nn
from torch.nn import functional as F

from saltflat import MESA
from saltflat.dialects import mesa_dialect


def kl(logits, teacher, temperature):
    log_q = F.log_softmax(logits / temperature, 1)
    return F.kl_div(log_q, F.softmax(teacher / temperature, 1), reduction="batchmean")


THEIRS = {
    "paper": lambda logits, teacher: 0.8 * kl(logits, teacher, 5.0),
    "released": lambda logits, teacher: 0.8 * 5.0**2 * kl(logits, teacher, 5.0),
    "cross_entropy": lambda logits, teacher: F.cross_entropy(logits, teacher.softmax(1)),
    "fastervit": lambda logits, teacher: 0.25 * 50 * kl(logits, teacher, 3.0),
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_dialects_gradient_is_mesas(name):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).double()
    mesa = MESA(model, **mesa_dialect(name, epochs=100))
    with torch.no_grad():
        model.weight += torch.randn_like(model.weight)
    mesa.set_epoch(50)
    x = torch.randn(8, FEATURES).double()
    logits = model(x)
    teacher = mesa.teacher(x)
    ours, theirs = mesa(logits, x), THEIRS[name](logits, teacher)
    found, expected = (
        torch.autograd.grad(loss, model.weight, retain_graph=True)[0] for loss in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    entropy = torch.distributions.Categorical(logits=teacher).entropy().mean()
    constant = entropy if name == "cross_entropy" else torch.zeros(()).double()
    torch.testing.assert_close(theirs - ours, constant, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("epochs", [8, 10, 300])
def test_a_quarter_of_the_training(epochs):
    start = mesa_dialect("cross_entropy", epochs)["start_epoch"]
    assert start == next(e for e in range(epochs) if e >= int(0.25 * epochs))
    start = mesa_dialect("fastervit", epochs)["start_epoch"]
    assert start == next(e for e in range(epochs) if e / epochs > 0.25)


def test_the_released_code_is_the_default_but_for_the_average_and_matching():
    defaults = inspect.signature(MESA).parameters
    released = mesa_dialect("released", epochs=200)
    others = {"warmup": False, "deviations": False, "match": "none"}
    assert {name: released.pop(name) for name in others} == others
    assert released == {name: defaults[name].default for name in released}


def test_an_unknown_dialect():
    with pytest.raises(ValueError, match="unknown dialect 'swiss': there are paper, released"):
        mesa_dialect("swiss", 10)
