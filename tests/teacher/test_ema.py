import copy
import gc
import io
import weakref
from types import MethodType

import pytest
import torch
from problems import conv_network, network
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from saltflat.core.cuda_graph import GraphedStep
from saltflat.core.registry import Part
from saltflat.teacher import EMATeacher, decay_for_half_life


def moved(model, seed):
    """The model after something like a step: weights, running statistics and counters changed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
        model.train()(torch.randn(16, 6, generator=generator).to(next(model.parameters())))
    return model


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class Whole(nn.Module):
    """With its own way to be copied, as Lightning's modules, which leaves nothing out."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x)

    def __getstate__(self):
        return dict(self.__dict__)


def compiled_forward(model):
    """As Lightning has the module of a torch.compile(module)."""
    model.forward = torch._dynamo.optimize("eager")(model.forward)


def bound_method(model):
    """As Accelerate has one that runs under autocast."""
    model.forward = MethodType(lambda self, x: self.net(x), model)


@pytest.mark.parametrize(
    "change", [lambda model: model.compile(backend="eager"), compiled_forward, bound_method]
)
def test_the_copy_runs_its_own_weights(change):
    model = Whole()
    x = torch.randn(4, 6)
    model(x)
    change(model)
    teacher = EMATeacher(model)
    before = teacher(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(teacher(x), before)
    assert not torch.equal(model.eval()(x), before)


def test_a_forward_that_would_run_the_model_is_refused():
    model = Whole()
    body = model.net.forward
    model.net.forward = lambda x: body(2 * x)
    with pytest.raises(ValueError, match=r"net\.forward"):
        EMATeacher(model)


@pytest.mark.parametrize("average_std", [True, False])
@pytest.mark.parametrize("decay", [0.3, 0.99])
def test_averages_parameters_and_float_buffers_and_copies_integers(decay, average_std, device):
    model = network().double().to(device)
    teacher = EMATeacher(model, decay=decay, average_std=average_std)
    expected = {name: t.clone() for name, t in tensors(model).items()}
    for step in range(20):
        teacher.update(moved(model, step))
        for name, live in tensors(model).items():
            if name.endswith("running_var") and average_std:
                deviation = decay * expected[name].sqrt() + (1 - decay) * live.sqrt()
                expected[name] = deviation**2
            elif live.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * live
            else:
                expected[name] = live.clone()
    for name, tensor in tensors(teacher.module).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
    assert teacher.module[1].num_batches_tracked == 20
    assert teacher.average_std == average_std


def test_equals_torchs_averaged_model():
    model = network()
    teacher = EMATeacher(model, decay=0.9)
    oracle = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    oracle.update_parameters(model)  # its first update is a copy
    for step in range(10):
        moved(model, step)
        teacher.update(model)
        oracle.update_parameters(model)
    ours, theirs = teacher.module.parameters(), oracle.module.parameters()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_decay_0_is_the_student_and_decay_1_never_moves(device):
    model = network().to(device)
    first = copy.deepcopy(model)
    student = EMATeacher(model, decay=0.0)
    still = EMATeacher(model, decay=1.0)
    for step in range(5):
        moved(model, step)
        student.update(model)
        still.update(model)
        for name, tensor in tensors(model).items():
            assert torch.equal(tensors(student.module)[name], tensor)
            if tensor.is_floating_point():
                assert torch.equal(tensors(still.module)[name], tensors(first)[name])


def test_layers_that_change_in_scale_alone_leave_the_outputs_as_they_are(device):
    """BatchNorm undoes the scale of the layer before it, in the model and so in its average."""
    body = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16)
    model = nn.Sequential(*body).double().to(device)
    for norm in (model[1], model[4]):
        norm.momentum, norm.eps = None, 1e-30
    data = torch.randn(64, 6, dtype=torch.float64, device=device)
    with torch.no_grad():
        outputs = model(data)
        teacher = EMATeacher(model, decay=0.9, average_std=True)
        for _ in range(12):
            for layer in (model[0], model[3]):
                layer.weight *= 0.7
                layer.bias *= 0.7
            for norm in (model[1], model[4]):
                norm.reset_running_stats()
            torch.testing.assert_close(model(data), outputs)
            teacher.update(model)
    torch.testing.assert_close(teacher(data), model.eval()(data))


def test_rounding_does_not_move_a_variance_that_stays_the_same():
    model = nn.BatchNorm1d(1000)
    model.running_var.uniform_(1e-6, 1e3)
    teacher = EMATeacher(model, decay=0.9999, average_std=True)
    for _ in range(1000):
        teacher.update(model)
    torch.testing.assert_close(teacher.module.running_var, model.running_var, rtol=2e-7, atol=0)


def test_an_update_that_fails_leaves_variances_variances(monkeypatch):
    model = nn.BatchNorm1d(3)
    teacher = EMATeacher(model, decay=0.5, average_std=True)
    model.running_var.fill_(9.0)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_lerp_", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            teacher.update(model)
    assert torch.equal(teacher.module.running_var, torch.ones(3))


def test_a_parameter_is_no_variance():
    model = nn.Module()
    model.running_var = nn.Parameter(torch.tensor([-1.0]))
    teacher = EMATeacher(model, decay=0.5, average_std=True)
    model.running_var.data.fill_(3.0)
    teacher.update(model)
    assert teacher.module.running_var.item() == 1


def test_warmup_forgets_the_initialisation():
    """What is left of it is the product of the decays: 9! n! / (n + 9)!, here 3e-7."""
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(1.0)
    warm, cold = (EMATeacher(model, decay=0.9995, warmup=w) for w in (True, False))
    model.weight.data.fill_(0.0)
    left = 1.0
    for t in range(20):
        warm.update(model), cold.update(model)
        left *= (1 + t) / (10 + t)
        assert warm.module.weight.item() == pytest.approx(left, rel=1e-9)
    assert left < 1e-6
    assert cold.module.weight.item() == pytest.approx(0.9995**20)


def test_the_decay_of_the_warmup_is_bounded_and_resumed():
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(1.0)
    small, late = EMATeacher(model, decay=0.05, warmup=True), EMATeacher(model, warmup=True)
    late.update(model)
    state = late.state_dict()
    state["_extra_state"] = torch.tensor([10**6, 1])
    late.load_state_dict(state)
    model.weight.data.fill_(0.0)
    small.update(model), late.update(model)
    assert small.module.weight.item() == pytest.approx(0.05)
    assert late.module.weight.item() == pytest.approx(0.9995)
    assert late.updates == 10**6 + 1


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_graphed_step_counts_once_and_does_the_same(warmup, frozen):
    """What a replay needs: `update` changes host state in `tick` alone."""
    model = network()
    eager, graphed = (EMATeacher(model, decay=0.9, warmup=warmup) for _ in range(2))
    assert isinstance(graphed, Part)
    eager.frozen = graphed.frozen = frozen
    step = GraphedStep(lambda: graphed.update(model), [graphed])
    for seed in range(4):
        moved(model, seed)
        eager.update(model)
        step()
        assert eager.updates == graphed.updates == seed + 1
        for name, tensor in eager.state_dict().items():
            assert torch.equal(graphed.state_dict()[name], tensor)
    assert graphed.graph_key() == (frozen,)


def test_a_frozen_teacher_counts_and_stays():
    model = network()
    teacher = EMATeacher(model, decay=0.5, warmup=True)
    teacher.update(model)
    before = copy.deepcopy(teacher.module.state_dict())
    teacher.frozen = True
    teacher.update(moved(model, 0))
    assert teacher.updates == 2
    for name, tensor in teacher.module.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_averaged_in_float32(dtype, device):
    """In bfloat16 itself, a step of 1 - 0.9995 of the way is rounded away every time."""
    model = nn.Linear(4, 4).to(device, dtype)
    nn.init.zeros_(model.weight)
    teacher = EMATeacher(model, decay=0.9995)
    nn.init.ones_(model.weight)
    for _ in range(1000):
        teacher.update(model)
    expected = torch.full((4, 4), 1 - 0.9995**1000, dtype=torch.float64).to(device, dtype)
    torch.testing.assert_close(teacher.module.weight, expected, rtol=2**-7, atol=0)
    again = EMATeacher(model, decay=0.9995)
    again.load_state_dict(teacher.state_dict())
    teacher.update(model), again.update(model)
    assert torch.equal(again.precise._buffers["weight"], teacher.precise._buffers["weight"])
    assert teacher(torch.ones(1, 4, dtype=dtype, device=device)).dtype == dtype


def test_shared_weights_are_averaged_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].weight.data.fill_(0.0)
    teacher = EMATeacher(model, decay=0.5)
    model[0].weight.data.fill_(1.0)
    teacher.update(model)
    assert (teacher.module[1].weight == 0.5).all()
    assert teacher.module[0].weight is teacher.module[1].weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_with_infinities_are_copied(dtype):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    model.to(dtype)
    teacher = EMATeacher(model)
    model.mask[0] = 1.0
    teacher.update(model)
    assert teacher.module.mask.tolist() == [1.0, -float("inf")]


def test_what_is_averaged_is_decided_once():
    """An observer that starts at infinity is copied for good, also after a resume."""
    model = nn.Linear(2, 2)
    model.register_buffer("greatest", torch.tensor(-float("inf")))
    first = EMATeacher(model, decay=0.5)
    model.greatest.fill_(1.0)
    first.update(model)
    second = EMATeacher(model, decay=0.5)
    second.load_state_dict(first.state_dict())
    model.greatest.fill_(3.0)
    first.update(model), second.update(model)
    assert first.module.greatest == second.module.greatest == 3.0


def test_a_cast_that_would_stop_the_average_is_refused():
    model = nn.Linear(2, 2)
    teacher = EMATeacher(model)
    teacher.update(model)
    teacher.bfloat16(), model.bfloat16()
    with pytest.raises(ValueError, match=r"weight.*torch.bfloat16"):
        teacher.update(model)
    with pytest.raises(ValueError, match=r"weight is torch.float32.*torch.bfloat16"):
        teacher.update(model.float())


def test_follows_tensors_that_the_model_replaces():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.zeros(1))
    teacher = EMATeacher(model, decay=0.5)
    teacher.update(model)
    model.scale = torch.ones(1)
    teacher.update(model)
    assert teacher.module.scale.item() == 0.5


def test_stays_in_eval_mode_without_gradient():
    teacher = EMATeacher(network())
    nn.ModuleList([teacher]).train()
    assert not any(module.training for module in teacher.module.modules())
    out = teacher(torch.randn(4, 6, requires_grad=True))
    assert not out.requires_grad
    assert not any(p.requires_grad for p in teacher.parameters())


def test_building_it_leaves_the_model_and_the_random_state_alone():
    model = network()
    state, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    teacher = EMATeacher(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(p.requires_grad for p in model.parameters())
    teacher.update(moved(copy.deepcopy(model), 0))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_does_not_keep_the_model_alive_and_can_be_copied():
    model = network()
    teacher = EMATeacher(model)
    teacher.update(model)
    twin = copy.deepcopy(teacher)
    moved(model, 0)
    teacher.update(model), twin.update(model)
    for mine, other in zip(teacher.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_looks_through_wrappers(wrap):
    model = network()
    teacher = EMATeacher(wrap(model), decay=0.0)
    assert type(teacher.module) is nn.Sequential
    teacher.update(wrap(moved(model, 0)))
    assert torch.equal(teacher.module[0].weight, model[0].weight)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_bad_decay(decay):
    with pytest.raises(ValueError, match=rf"decay.*got {decay}"):
        EMATeacher(network(), decay=decay)


def test_another_model_is_refused():
    teacher = EMATeacher(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="bias"):
        teacher.update(nn.Linear(2, 2, bias=False))
    with pytest.raises(ValueError, match=r"weight is .*\(2, 3\).*\(2, 2\)"):
        teacher.update(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"weight is .*on meta.*on cpu"):
        teacher.update(nn.Linear(2, 2, device="meta"))


def test_half_life():
    assert decay_for_half_life(2, 100) ** 200 == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"half_life_epochs.*got 0"):
        decay_for_half_life(0, 10)
    with pytest.raises(ValueError, match=r"steps_per_epoch.*got -1"):
        decay_for_half_life(1, -1)


def images(seed=0):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).double()


def folded():
    """A model, a teacher that folds, and one that does not."""
    torch.manual_seed(0)
    model = conv_network().double()
    teacher, plain = (EMATeacher(model, decay=0.5) for _ in range(2))
    assert teacher.fold()
    return model, teacher, plain


def assert_same(teacher, plain):
    got, expected = teacher(images()), plain(images())
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(got, expected), "the twin ran: it rounds otherwise"


def trained(model, seed):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        model.train()(images(seed))
    return model


def test_the_twin_follows_updates_loading_and_casts():
    model, teacher, plain = folded()
    for seed in range(3):
        teacher.update(trained(model, seed)), plain.update(model)
        assert_same(teacher, plain)
    other = EMATeacher(trained(copy.deepcopy(model), 7))
    for assign in (False, True):
        for each in (teacher, plain):
            each.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        assert_same(teacher, plain)
        other.update(trained(model, 8))
    holder = nn.ModuleList([teacher])
    holder.load_state_dict(nn.ModuleList([other]).state_dict())
    assert_same(teacher, other)
    teacher.float(), other.float()
    torch.testing.assert_close(teacher(images().float()), other(images().float()))
    teacher.double(), other.double()
    assert_same(teacher, other)


def test_loading_in_place_keeps_the_memory_that_a_graph_knows(monkeypatch):
    model, teacher, plain = folded()
    plain.update(trained(model, 0))
    monkeypatch.setattr(EMATeacher, "fold", lambda _: 1 / 0)
    teacher.load_state_dict(plain.state_dict())
    assert_same(teacher, plain)


def test_other_arguments_are_the_modules():
    class Scaled(nn.Sequential):
        def forward(self, x, scale=None):
            x = super().forward(x)
            return x if scale is None else x * scale

    model = Scaled(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).double()
    teacher, plain = EMATeacher(model), EMATeacher(model)
    assert teacher.fold()
    torch.testing.assert_close(teacher(images()), plain(images()))
    assert torch.equal(teacher(images(), scale=2.0), plain(images(), scale=2.0))
    assert torch.equal(teacher(images(), 2.0), plain(images(), 2.0))


def test_the_twin_is_no_part_of_the_teacher():
    _, teacher, plain = folded()
    assert teacher.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in teacher.named_modules()] == [n for n, _ in plain.named_modules()]
    assert teacher.nbytes > plain.nbytes
    file = io.BytesIO()
    torch.save(teacher, file)
    file.seek(0)
    for copied in (copy.deepcopy(teacher), torch.load(file, weights_only=False)):
        assert copied.nbytes == plain.nbytes
        assert torch.equal(copied(images()), plain(images()))
        assert copied.fold()
        assert_same(copied, plain)


def test_what_cannot_be_folded_runs_as_it_is():
    model = network()
    teacher = EMATeacher(model)
    assert not teacher.fold()
    x = torch.randn(4, 6)
    assert torch.equal(teacher(x), model.eval()(x))


def test_a_folded_teacher_can_be_compiled():
    _, teacher, plain = folded()
    compiled = torch.compile(teacher, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), plain(images()))


@pytest.mark.parametrize("inside", [True, False])
def test_a_graphed_step_counts_the_updates_that_there_are(inside):
    """The update may be part of the step or follow it."""
    model = network()
    teacher, twin = (EMATeacher(model, decay=0.9, warmup=True) for _ in range(2))

    def step(x):
        with torch.no_grad():
            model[0].weight.add_(x)
        if inside:
            teacher.update(model)

    graphed = GraphedStep(step, [teacher])
    for number in range(5):
        graphed(torch.tensor(float(number)))
        if not inside:
            teacher.update(model)
        twin.update(model)
    assert teacher.updates == twin.updates == 5
    assert torch.equal(teacher.module[0].weight, twin.module[0].weight)
