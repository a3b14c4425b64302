from typing import NamedTuple

import numpy as np
import pytest
import torch
from problems import CLASSES, FEATURES, SAMPLES, dataset, network
from references import mesa_training
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat import MESA, trajectory_loss


@pytest.mark.parametrize("freeze_epoch", [None, 2, 5])
def test_training_equals_algorithm_1(freeze_epoch):
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
        freeze_epoch=freeze_epoch,
    )
    model = nn.Linear(FEATURES, CLASSES, bias=False).double()
    model.weight.data.copy_(torch.from_numpy(weight.T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    mesa = MESA(
        model,
        weight=0.8,
        temperature=3.0,
        decay=0.9,
        start_epoch=3,
        freeze_epoch=freeze_epoch,
    )
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


def test_the_teacher_runs_on_the_first_batch_and_then_from_the_start_on():
    model = network()
    mesa, passes = MESA(model, start_epoch=2), []
    mesa.teacher.module.register_forward_hook(lambda *_: passes.append(1))
    x = torch.randn(4, FEATURES)
    for epoch, expected in enumerate([1, 1, 2, 3]):
        mesa.set_epoch(epoch)
        mesa(model(x), x)
        mesa.update(model)
        assert len(passes) == expected
    mesa.eval()
    assert mesa(model(x), x) == 0
    assert len(passes) == 3


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
@pytest.mark.parametrize("rescale", [False, True])
def test_a_row_that_is_not_finite_is_left_out(side, rescale):
    """A row of the model's is counted as well."""
    model = nn.Linear(3, 2)
    mesa = MESA(model, start_epoch=0, rescale=rescale)
    mesa.set_epoch(0)
    x = torch.randn(4, 3)
    logits = (model(x) + torch.randn(4, 2)).detach()
    expected = mesa(logits[1:], x[1:]) * 3 / 4
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
    assert mesa.nonfinite_rows == (side == "student")


def test_one_word_if_the_update_is_forgotten():
    model = network()
    mesa = MESA(model)
    mesa.set_epoch(0)
    with pytest.warns(UserWarning, match=r"mesa.update\(model\)"):
        mesa.set_epoch(1)


class Tupled(nn.Linear):
    """A model that returns more than its logits."""

    def forward(self, x):
        return super().forward(x), x


def test_a_model_that_returns_a_tuple_is_noticed_on_the_first_call():
    model, x = Tupled(3, 2), torch.randn(4, 3)
    mesa = MESA(model, start_epoch=5)
    mesa.set_epoch(0)
    with pytest.raises(ValueError, match=r"\(4, 2\), got tuple.*output="):
        mesa(model(x)[0], x)


def test_output_takes_the_logits_out_of_what_the_model_returns():
    model, x = Tupled(3, 2), torch.randn(4, 3)
    mesa = MESA(model, start_epoch=0, output=lambda out: out[0])
    mesa.set_epoch(0)
    assert mesa(model(x)[0], x) == 0
    assert mesa(2 * model(x)[0], x) > 0


def test_a_model_whose_output_has_logits():
    class Output(NamedTuple):
        logits: torch.Tensor

    class Named(nn.Linear):
        def forward(self, x):
            return Output(super().forward(x))

    model = Named(3, 2)
    mesa = MESA(model, start_epoch=0)
    mesa.set_epoch(0)
    x = torch.randn(4, 3)
    assert mesa(model(x).logits, x) == 0
    assert mesa(2 * model(x).logits, x) > 0


def test_one_logit_is_refused_on_the_first_call():
    """Its probability is always 1."""
    for shape in ((4, 1), (4,)):
        mesa = MESA(nn.Linear(3, 1), start_epoch=5)
        mesa.set_epoch(0)
        with pytest.raises(ValueError, match=r"outputs.*got \(4,.*torch.cat"):
            mesa(torch.zeros(shape), torch.zeros(4, 3))


def test_images_need_class_dim():
    """Of (N, C, H, W) the last dimension is the width."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(2, 3, 1), torch.randn(4, 2, 5, 6)
    now = torch.randn(4, 3, 5, 6)
    refused = MESA(model, start_epoch=0)
    refused.set_epoch(0)
    with pytest.raises(ValueError, match=r"outputs.*\(4, 3, 5, 6\).*class_dim=1"):
        refused(now, x)
    mesa = MESA(model, start_epoch=0, class_dim=1)
    last = MESA(model, start_epoch=0, class_dim=-1, output=lambda out: out.movedim(1, -1))
    mesa.set_epoch(0), last.set_epoch(0)
    first, second = now.clone().requires_grad_(), now.movedim(1, -1).clone().requires_grad_()
    loss, expected = mesa(first, x), last(second, x)
    (loss + expected).backward()
    assert loss > 0
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(first.grad.movedim(1, -1), second.grad)
    torch.testing.assert_close(
        loss, 0.8 * trajectory_loss(now.movedim(1, -1), model(x).movedim(1, -1))
    )


def test_a_class_dim_that_there_is_not():
    mesa = MESA(nn.Linear(3, 2), class_dim=3)
    mesa.set_epoch(0)
    with pytest.raises(ValueError, match=r"outputs.*got \(4, 2\)"):
        mesa(torch.zeros(4, 2), torch.zeros(4, 3))


def test_the_student_is_not_part_of_its_state():
    model = network()
    mesa = MESA(model)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in mesa.parameters()}
    assert all(name.startswith(("teacher.", "epochs", "counts")) for name in mesa.state_dict())


def moved_model():
    """A model, a MESA whose teacher lies elsewhere, and inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    mesa = MESA(model, start_epoch=1)
    mesa.set_epoch(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    return model, mesa, torch.randn(10, 3)


def test_a_frozen_teacher_counts_and_stays_also_after_a_resume():
    model, mesa, x = moved_model()
    mesa.freeze_epoch = 2
    mesa.update(model)
    mesa.set_epoch(2)
    before = mesa.teacher(x)
    again = MESA(model, start_epoch=1, freeze_epoch=2)
    again.load_state_dict(mesa.state_dict())  # and no set_epoch
    for one in (mesa, again):
        assert one.teacher.frozen
        one.update(model)
        assert one.teacher.updates == 2
        assert torch.equal(one.teacher(x), before)
    assert not torch.equal(before, model(x))


def test_a_teacher_may_be_frozen_by_hand():
    model, mesa, x = moved_model()
    mesa.update(model)
    mesa.teacher.frozen = True
    before = mesa.teacher(x)
    mesa.set_epoch(2)
    mesa.update(model)
    assert torch.equal(mesa.teacher(x), before)


def test_one_word_if_a_teacher_is_frozen_as_it_was_made():
    with pytest.warns(UserWarning, match="the teacher still is the initial model"):
        MESA(network(), freeze_epoch=3).set_epoch(3)


def test_rescaling_is_what_the_formula_says():
    torch.manual_seed(0)
    model, x = nn.Linear(FEATURES, CLASSES).double(), torch.randn(5, FEATURES).double()
    other = nn.Linear(FEATURES, CLASSES).double()
    mesa = MESA(other, start_epoch=0, weight=0.7, temperature=2.0, rescale=True)
    mesa.set_epoch(0)
    z, q = model(x).detach().numpy(), mesa.teacher(x).numpy()
    flat = [(rows - rows.mean(-1, keepdims=True)).reshape(-1, 1) for rows in (q, z)]
    q = q * max(np.linalg.lstsq(*flat, rcond=None)[0].item(), 0)
    p, now = (np.exp(v / 2) / np.exp(v / 2).sum(-1, keepdims=True) for v in (q, z))
    expected = 0.7 * 4 * (p * np.log(p / now)).sum(-1).mean()
    np.testing.assert_allclose(mesa(model(x), x).item(), expected, rtol=1e-12)


@pytest.mark.parametrize("rescale", [False, True])
def test_how_large_the_teachers_outputs_are_matters_unless_they_are_rescaled(rescale):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), torch.randn(5, 3).double()
    mesa = MESA(nn.Linear(3, 4).double(), start_epoch=0, rescale=rescale)
    mesa.set_epoch(0)
    with torch.no_grad():
        logits = mesa.teacher(x) + 0.3 * model(x)
    before = mesa(logits, x)
    for tensor in mesa.teacher.module.parameters():
        tensor *= 3
    assert torch.allclose(before, mesa(logits, x), rtol=1e-12) == rescale


@pytest.mark.parametrize("average_std", [True, False])
def test_the_teacher_averages_as_it_is_told(average_std):
    model = torch.nn.BatchNorm1d(2)
    mesa = MESA(model, decay=0.5, average_std=average_std)
    model.running_var.fill_(9.0)
    mesa.update(model)
    assert mesa.teacher.module.running_var.tolist() == [4.0 if average_std else 5.0] * 2


def test_the_defaults_are_those_of_the_released_code():
    mesa = MESA(nn.Linear(2, 2))
    assert "weight=0.8, temperature=5.0, start_epoch=5, tau_squared=True" in repr(mesa)
    assert "rescale=False, freeze_epoch=None" in repr(mesa)
    assert "decay=0.9995, warmup=False, average_std=False" in repr(mesa)
