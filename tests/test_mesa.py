import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from problems import CLASSES, FEATURES, SAMPLES, dataset, network
from references import mesa_training
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat import MESA
from saltflat._match import MATCHES, multiple, sums


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
        warmup=False,
        match="none",
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
    mesa = MESA(model, start_epoch=0, match="none")
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


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
@pytest.mark.parametrize("start_epoch", [0, 5])
def test_one_logit_has_no_trajectory(shape, start_epoch):
    """Its probability is always 1; said at the first call, not in epoch 5."""
    mesa = MESA(nn.Linear(3, 1), start_epoch=start_epoch)
    mesa.set_epoch(0)
    with pytest.raises(ValueError, match=r"2 or more classes, got \(4,.*torch.cat"):
        mesa(torch.zeros(shape), torch.zeros(4, 3))


def test_a_model_whose_output_has_logits():
    class Output(NamedTuple):
        logits: torch.Tensor

    class Named(nn.Linear):
        def forward(self, x):
            return Output(super().forward(x))

    model = Named(3, 2)
    mesa = MESA(model, start_epoch=0, match="none")
    mesa.set_epoch(0)
    x = torch.randn(4, 3)
    assert mesa(model(x).logits, x) == 0
    assert mesa(2 * model(x).logits, x) > 0


def test_the_student_is_not_part_of_its_state():
    model = network()
    mesa = MESA(model)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in mesa.parameters()}
    assert all(name.startswith(("teacher.", "_")) for name in mesa.state_dict())


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


def test_one_step_of_an_interval_has_the_whole_pull():
    model, mesa, x = moved_model()
    expected = mesa(model(x), x)
    passes = []
    mesa.teacher.register_forward_hook(lambda *_: passes.append(1))
    mesa.interval = 3
    seen = []
    for _ in range(6):
        for _ in range(2):  # the parts of a step
            mesa.prefetch(x)
            seen.append(mesa(model(x), x))
        mesa.teacher.updates += 1  # and the teacher stays where it is
    assert len(passes) == 4
    for step, losses in enumerate(zip(seen[::2], seen[1::2], strict=True)):
        for loss in losses:
            torch.testing.assert_close(loss, (3 if step % 3 == 0 else 0) * expected)


def test_an_interval_goes_on_where_it_was():
    model, mesa, x = moved_model()
    mesa.interval = 2
    mesa.update(model)
    again = MESA(model, start_epoch=1, interval=2)
    again.load_state_dict(mesa.state_dict())
    again.set_epoch(1)
    assert not mesa.pulls and not again.pulls
    mesa.update(model), again.update(model)
    assert mesa.pulls and again.pulls
    assert mesa(model(x), x) == again(model(x), x) > 0


def test_a_frozen_teacher_counts_and_stays_also_after_a_resume():
    model, mesa, x = moved_model()
    mesa.freeze_epoch, mesa.interval = 2, 2
    mesa.update(model)
    mesa.set_epoch(2)
    before = mesa.teacher(x)
    again = MESA(model, start_epoch=1, freeze_epoch=2, interval=2)
    again.load_state_dict(mesa.state_dict())  # and no set_epoch
    for one in (mesa, again):
        assert one.teacher.frozen and not one.pulls
        one.update(model)
        assert one.pulls and one.teacher.updates == 2
        assert torch.equal(one.teacher(x), before)
    assert not torch.equal(before, model(x))
    mesa.load_state_dict(MESA(model).state_dict())
    assert not mesa.teacher.frozen, "that state is of before the first epoch"


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


@pytest.mark.parametrize("freeze_epoch", [0, -1, True, 2.0, "2"])
def test_a_teacher_is_frozen_in_an_epoch(freeze_epoch):
    with pytest.raises(ValueError, match="freeze_epoch must be a whole number from 1, got"):
        MESA(nn.Linear(2, 2), freeze_epoch=freeze_epoch)


@pytest.mark.parametrize("interval", [0, -1, True])
def test_an_interval_is_a_number_of_steps(interval):
    with pytest.raises(ValueError, match="interval must be a whole number of at least 1, got"):
        MESA(nn.Linear(2, 2), interval=interval)


def test_a_pass_started_early_is_taken_once_and_for_its_own_inputs():
    model, mesa, x = moved_model()
    expected = mesa(model(x), x)
    passes = []
    mesa.teacher.register_forward_hook(lambda *_: passes.append(1))
    mesa.prefetch(x)
    assert torch.equal(mesa(model(x), x), expected)
    assert len(passes) == 1
    mesa.prefetch(-x)
    assert torch.equal(mesa(model(x), x), expected)
    assert len(passes) == 3
    assert torch.equal(mesa(model(x), x), expected), "what was prefetched is gone"
    assert len(passes) == 4


def test_nothing_is_started_early_before_the_start_or_in_eval_mode():
    model, mesa, x = moved_model()
    passes = []
    mesa.teacher.register_forward_hook(lambda *_: passes.append(1))
    mesa.eval()
    mesa.prefetch(x)
    other = MESA(model, start_epoch=1)
    other.set_epoch(0)
    other.teacher.register_forward_hook(lambda *_: passes.append(1))
    other.prefetch(x)
    assert passes == []


def test_what_was_started_early_is_not_used_when_something_changed_since():
    model, mesa, x = moved_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesa.prefetch(x)
    x *= 3  # in place: the same tensor, other numbers
    got = mesa(model(x), x)
    torch.testing.assert_close(got, mesa(model(x), x.clone()))
    mesa.prefetch(x)
    model(x).sum().backward()
    optimizer.step()
    mesa.update(model)
    assert torch.equal(mesa(model(x), x), mesa(model(x), x.clone()))
    state = {name: tensor.clone() for name, tensor in mesa.state_dict().items()}
    mesa.prefetch(x)
    doubled = {name: t * 2 if t.is_floating_point() else t for name, t in state.items()}
    mesa.load_state_dict(doubled)
    assert torch.equal(mesa(model(x), x), mesa(model(x), x.clone()))


def test_a_copy_of_mesa_has_nothing_under_way():
    model, mesa, x = moved_model()
    expected = mesa(model(x), x)
    mesa.prefetch(x)
    assert torch.equal(copy.deepcopy(mesa)(model(x), x), expected)


def test_with_batch_statistics_the_two_differ_by_their_weights_alone():
    """As long as the teacher is the model, the loss is 0; by averaged statistics it is not."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    x = 3 + torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(0))
    for by_batch in (False, True):
        mesa = MESA(model, start_epoch=0, batch_statistics=by_batch)
        mesa.set_epoch(0)
        assert (mesa(model(x), x) == 0) == by_batch
    with torch.no_grad():
        model[0].weight += 0.1
    assert mesa(model(x), x) > 0


def model_and_another_teacher(**settings):
    """A model whose teacher is another network, and MESA of the two."""
    torch.manual_seed(0)
    model, x = nn.Linear(FEATURES, CLASSES).double(), torch.randn(5, FEATURES).double()
    mesa = MESA(nn.Linear(FEATURES, CLASSES).double(), start_epoch=0, **settings)
    mesa.set_epoch(0)
    return model, mesa, x


@pytest.mark.parametrize("match", ["spread", "nearest"])
def test_matching_is_what_the_formula_says(match):
    model, mesa, x = model_and_another_teacher(weight=0.7, temperature=2.0, match=match)
    z, q = model(x).detach().numpy(), mesa.teacher(x).numpy()
    if match == "spread":
        q = q * np.sqrt(z.var(-1).mean() / q.var(-1).mean())
    else:
        flat = [(rows - rows.mean(-1, keepdims=True)).reshape(-1, 1) for rows in (q, z)]
        q = q * np.linalg.lstsq(*flat)[0]
    p, now = (np.exp(v / 2) / np.exp(v / 2).sum(-1, keepdims=True) for v in (q, z))
    expected = 0.7 * 4 * (p * np.log(p / now)).sum(-1).mean()
    np.testing.assert_allclose(mesa(model(x), x).item(), expected, rtol=1e-12)


@pytest.mark.parametrize("deviations", [True, False])
def test_the_teacher_averages_as_it_is_told(deviations):
    model = torch.nn.BatchNorm1d(2)
    mesa = MESA(model, decay=0.5, warmup=False, deviations=deviations)
    model.running_var.fill_(9.0)
    mesa.update(model)
    assert mesa.teacher.module.running_var.tolist() == [4.0 if deviations else 5.0] * 2


def test_it_says_what_it_does_to_the_teachers_outputs():
    _, mesa, _ = model_and_another_teacher(match="spread", interval=2)
    assert "batch_statistics=False, match='spread', freeze_epoch=None, interval=2" in repr(mesa)


@pytest.mark.parametrize("match", MATCHES)
def test_how_large_the_teachers_outputs_are_matters_unless_they_are_matched(match):
    model, mesa, x = model_and_another_teacher(match=match)
    before = mesa(model(x), x)
    for tensor in mesa.teacher.module.parameters():
        tensor *= 3
    after = mesa(model(x), x)
    assert torch.allclose(before, after, rtol=1e-12) == (match != "none")


@pytest.mark.parametrize("match", MATCHES)
def test_a_teacher_that_is_the_model_pulls_by_nothing(match):
    model, _, x = model_and_another_teacher()
    mesa = MESA(model, start_epoch=0, match=match)
    mesa.set_epoch(0)
    logits = model(x)
    loss = mesa(logits, x)
    loss.backward()
    assert loss == 0 and not model.weight.grad.any()


def test_nothing_pulls_along_the_outputs_of_the_nearest_teacher():
    model, mesa, x = model_and_another_teacher(temperature=1e4, match="nearest")
    logits, reference = model(x).detach().requires_grad_(), mesa.teacher(x)
    mesa(logits, x).backward()  # at a high temperature the loss is the squared distance
    along = (logits.grad * (reference - reference.mean(-1, keepdim=True))).sum()
    assert abs(along) < 1e-3 * logits.grad.norm() * reference.norm()


def test_a_nearest_teacher_that_says_the_opposite_pulls_to_equal_outputs():
    rows = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    assert multiple(sums(-rows, rows, "nearest"), "nearest") == 0


def test_a_match_that_there_is_not():
    with pytest.raises(ValueError, match="one of none, spread, nearest, got 'size'"):
        MESA(nn.Linear(2, 2), match="size")


@pytest.mark.parametrize("match", ["spread", "nearest"])
def test_rows_without_a_spread_or_a_number_do_not_hinder_the_others(match):
    model, mesa, x = model_and_another_teacher(match=match)
    logits = model(x)
    expected = mesa(logits, x)
    logits = torch.cat([logits, torch.full((1, CLASSES), torch.nan).double()])
    got = mesa(logits, torch.cat([x, x[:1]]))
    torch.testing.assert_close(got, expected)
    assert mesa.nonfinite_rows == 1
    for tensor in mesa.teacher.module.parameters():
        tensor *= 1e-160  # too small a variance to divide by
    assert mesa(model(x), x) > 0 and mesa.nonfinite_rows == 1
    for tensor in mesa.teacher.module.parameters():
        tensor.zero_()  # the same output for every class
    same = mesa(model(x), x)
    assert same.isfinite() and same > 0


def test_spreads_are_matched_in_float32_whatever_comes_in():
    z, q = torch.randn(2, 4, CLASSES, generator=torch.Generator().manual_seed(0)).bfloat16()
    factor = multiple(sums(q, z, "spread"), "spread")
    assert factor.dtype == torch.float32
    matched = factor * q.float()
    torch.testing.assert_close(matched.var(-1).mean(), z.float().var(-1).mean())
