import pytest
import torch
from problems import network
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from saltflat import sam
from saltflat.train.config import OptimizerConfig
from saltflat.train.optim import build_optimizer, build_schedule, warmup_cosine


def rates(optimizer, schedule, steps):
    """The learning rate of each step."""
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)


def test_without_warmup_it_is_torchs_cosine():
    optimizer, twin = sgd(), sgd()
    schedule = build_schedule(optimizer, OptimizerConfig(lr=0.3), epochs=3, steps_per_epoch=7)
    expected = rates(twin, CosineAnnealingLR(twin, T_max=21), 21)
    assert rates(optimizer, schedule, 21) == pytest.approx(expected, abs=1e-12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_with_warmup_it_is_torchs_line_and_then_its_cosine():
    optimizer, line, cosine = sgd(), sgd(), sgd()
    config = OptimizerConfig(lr=0.3, warmup_epochs=0.5)  # 5 steps of 10
    schedule = build_schedule(optimizer, config, epochs=3, steps_per_epoch=10)
    expected = [
        *rates(line, LinearLR(line, start_factor=1 / 5, total_iters=4), 5),
        *rates(cosine, CosineAnnealingLR(cosine, T_max=25), 25),
    ]
    assert rates(optimizer, schedule, 30) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 3, 12, 20])
def test_the_share_rises_to_one_and_then_falls(warmup):
    shares = [warmup_cosine(step, warmup, 12) for step in range(12)]
    top = min(max(warmup - 1, 0), 11)
    assert all(0 < share <= 1 for share in shares)
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)
    assert warmup > 12 or shares[top] == 1


def test_a_schedule_goes_on_from_its_state_also_under_a_wrapper():
    config = OptimizerConfig(lr=0.3, warmup_epochs=1)
    whole, part, rest = (sam.SAM(sgd()) for _ in range(3))

    def steps(optimizer, schedule, count):
        (weight,) = optimizer.param_groups[0]["params"]
        seen = []
        for _ in range(count):
            before = weight.item()
            optimizer.step(lambda: weight.sum().backward())
            seen.append(before - weight.item())  # the gradient is 1 everywhere
            schedule.step()
        return seen

    expected = steps(whole, build_schedule(whole, config, 3, 4), 12)
    schedule = build_schedule(part, config, 3, 4)
    begun = steps(part, schedule, 5)
    resumed = build_schedule(rest, config, 3, 4)
    rest.load_state_dict(part.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert begun + steps(rest, resumed, 7) == pytest.approx(expected, abs=1e-6)
    shares = [warmup_cosine(step, 4, 12) for step in range(12)]
    assert expected == pytest.approx([0.3 * share for share in shares], abs=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("decay_vectors", [True, False])
def test_what_decays(name, decay_vectors):
    model = network()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 1, 2)
        parameter.grad = torch.zeros_like(parameter)
    model[0].weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(name=name, lr=0.1, weight_decay=0.5, decay_vectors=decay_vectors)
    optimizer = build_optimizer(model, config)
    assert type(optimizer) is {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    optimizer.step()  # no gradient: a weight that decays is 1 - lr * decay of what it was
    for name, parameter in model.named_parameters():
        decays = name == "3.weight" or (decay_vectors and name != "0.weight")
        torch.testing.assert_close(parameter.data, before[name] * (0.95 if decays else 1))


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_every_trained_parameter_is_there_once(decay_vectors):
    model = network()
    model[3].bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(decay_vectors=decay_vectors))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_nesterovs_step():
    model = nn.Linear(1, 1, bias=False).double()
    config = OptimizerConfig(lr=0.1, momentum=0.5, weight_decay=0.0, nesterov=True)
    optimizer = build_optimizer(model, config)
    weight, moved = model.weight.item(), []
    for _ in range(2):
        model.weight.grad = torch.ones(1, 1, dtype=torch.float64)
        optimizer.step()
        moved.append(weight - model.weight.item())
        weight = model.weight.item()
    # The buffer is 1, then 1.5; a step is lr (gradient + momentum * buffer).
    assert moved == pytest.approx([0.1 * 1.5, 0.1 * 1.75], abs=1e-12)


def test_a_model_without_vectors():
    model = nn.Linear(2, 2, bias=False)
    optimizer = build_optimizer(model, OptimizerConfig(decay_vectors=False))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
    optimizer.step()


def test_settings_arrive():
    model = nn.Linear(2, 2)
    group = build_optimizer(model, OptimizerConfig(lr=0.2, momentum=0.7)).param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.2, 0.7, 5e-4)
    config = OptimizerConfig(name="adamw", lr=0.2, betas=(0.8, 0.9))
    assert build_optimizer(model, config).param_groups[0]["betas"] == (0.8, 0.9)
