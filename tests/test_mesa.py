import numpy as np
import pytest
import torch
from problems import CLASSES, FEATURES, SAMPLES, dataset, network
from references import mesa_training
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat import MESA


def test_training_equals_algorithm_1():
    generator = np.random.default_rng(0)
    data = [tensor.numpy() for tensor in dataset().tensors]
    x, y = data[0].astype("float64"), data[1]
    weight = generator.normal(size=(FEATURES, CLASSES))
    epochs = []
    for _ in range(8):
        order = generator.permutation(SAMPLES).reshape(4, 6)
        epochs.append([(index, x[index], y[index]) for index in order])
    expected = mesa_training(
        weight,
        epochs,
        learning_rate=0.2,
        strength=0.8 * 9,
        temperature=3.0,
        decay=0.9,
        start_epoch=3,
    )
    model = nn.Linear(FEATURES, CLASSES, bias=False).double()
    model.weight.data.copy_(torch.from_numpy(weight.T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    mesa = MESA(model, weight=0.8, temperature=3.0, decay=0.9, start_epoch=3, warmup=False)
    steps = iter(expected)
    for epoch, batches in enumerate(epochs):
        mesa.set_epoch(epoch)
        for _, *batch in batches:
            features, labels = map(torch.from_numpy, batch)
            expected_loss, expected_weights, expected_teacher = next(steps)
            np.testing.assert_allclose(
                mesa.teacher.module.weight.numpy().T, expected_teacher, rtol=1e-11, atol=1e-11
            )
            logits = model(features)
            loss = cross_entropy(logits, labels) + mesa(logits, features)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mesa.update(model)
            np.testing.assert_allclose(loss.item(), expected_loss, rtol=1e-11)
            np.testing.assert_allclose(
                model.weight.detach().numpy().T, expected_weights, rtol=1e-11, atol=1e-11
            )
    assert next(steps, None) is None


def test_runs_no_teacher_pass_before_the_start_or_in_eval_mode():
    model = network()
    mesa, passes = MESA(model, start_epoch=2), []
    mesa.teacher.module.register_forward_hook(lambda *_: passes.append(1))
    x = torch.randn(4, FEATURES)
    for epoch, expected in enumerate([0, 0, 1, 2]):
        mesa.set_epoch(epoch)
        mesa(model(x), x)
        mesa.update(model)
        assert len(passes) == expected
    mesa.eval()
    assert mesa(model(x), x) == 0
    assert len(passes) == 2


def test_the_teacher_gets_what_the_model_got():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, y, *, scale):
            return self.linear(x + y) * scale

    model = Scaled()
    mesa = MESA(model, start_epoch=0)
    mesa.set_epoch(0)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    assert mesa(model(x, y, scale=2.0), x, y, scale=2.0) == 0
    assert mesa(model(x, y, scale=2.0), x, y, scale=3.0) > 0


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_row_that_is_not_finite_is_left_out_and_counted(side):
    model = nn.Linear(3, 2)
    mesa = MESA(model, start_epoch=0)
    mesa.set_epoch(0)
    x = torch.randn(4, 3)
    logits = (model(x) + torch.randn(4, 2)).detach()
    expected = mesa(logits[1:], x[1:])
    assert mesa.nonfinite_rows == 0
    if side == "student":
        logits[0, 1] = float("nan")
    else:
        x[0, 0] = float("inf")
    logits.requires_grad_()
    loss = mesa(logits, x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert logits.grad.isfinite().all() and logits.grad[0].count_nonzero() == 0
    assert mesa.nonfinite_rows == 1


def test_one_word_if_the_update_is_forgotten():
    model = network()
    mesa = MESA(model)
    mesa.set_epoch(0)
    with pytest.warns(UserWarning, match=r"call mesa.update\(model\) after every"):
        mesa.set_epoch(1)


def test_a_model_that_returns_something_else():
    class Tupled(nn.Linear):
        def forward(self, x):
            return (super().forward(x),)

    model = Tupled(3, 2)
    mesa = MESA(model, start_epoch=0)
    mesa.set_epoch(0)
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"logits of shape \(4, 2\), got tuple"):
        mesa(model(x)[0], x)


def test_the_student_is_not_part_of_its_state():
    model = network()
    mesa = MESA(model)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in mesa.parameters()}
    assert all(name.startswith(("teacher.", "_")) for name in mesa.state_dict())
