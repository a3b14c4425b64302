import copy
import gc
import weakref
from types import MethodType

import pytest
import torch
from problems import network
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from saltflat import EMATeacher, decay_for_half_life


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
    with pytest.raises(ValueError, match=r"net.forward is a function that was put on the object"):
        EMATeacher(model)


@pytest.mark.parametrize("deviations", [True, False])
@pytest.mark.parametrize("decay", [0.3, 0.99])
def test_averages_parameters_and_float_buffers_and_copies_integers(decay, deviations, device):
    model = network().double().to(device)
    teacher = EMATeacher(model, decay=decay, warmup=False, deviations=deviations)
    expected = {name: t.clone() for name, t in tensors(model).items()}
    for step in range(20):
        teacher.update(moved(model, step))
        for name, live in tensors(model).items():
            if name.endswith("running_var") and deviations:
                deviation = decay * expected[name].sqrt() + (1 - decay) * live.sqrt()
                expected[name] = deviation**2
            elif live.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * live
            else:
                expected[name] = live.clone()
    for name, tensor in tensors(teacher.module).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
    assert teacher.module[1].num_batches_tracked == 20
    assert teacher.deviations == deviations


def test_equals_torchs_averaged_model():
    model = network()
    teacher = EMATeacher(model, decay=0.9, warmup=False)
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
    student = EMATeacher(model, decay=0.0, warmup=False)
    still = EMATeacher(model, decay=1.0, warmup=False)
    for step in range(5):
        moved(model, step)
        student.update(model)
        still.update(model)
        for name, tensor in tensors(model).items():
            # A variance is a root that was squared.
            near = {"rtol": 2e-7 if name.endswith("running_var") else 0, "atol": 0}
            torch.testing.assert_close(tensors(student.module)[name], tensor, **near)
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
        teacher = EMATeacher(model, decay=0.9)
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
    teacher = EMATeacher(model, decay=0.9999, warmup=False)
    for _ in range(1000):
        teacher.update(model)
    torch.testing.assert_close(teacher.module.running_var, model.running_var, rtol=2e-7, atol=0)


def test_an_update_that_fails_leaves_variances_variances(monkeypatch):
    model = nn.BatchNorm1d(3)
    teacher = EMATeacher(model, decay=0.5)
    model.running_var.fill_(9.0)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_lerp_", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            teacher.update(model)
    assert torch.equal(teacher.module.running_var, torch.ones(3))


def test_a_parameter_is_no_variance():
    model = nn.Module()
    model.running_var = nn.Parameter(torch.tensor([-1.0]))
    teacher = EMATeacher(model, decay=0.5, warmup=False)
    model.running_var.data.fill_(3.0)
    teacher.update(model)
    assert teacher.module.running_var.item() == 1


def test_warmup_forgets_the_initialisation():
    """What is left of it is the product of the decays: 9! n! / (n + 9)!, here 3e-7."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    warm, cold = (EMATeacher(model, decay=0.9995, warmup=w) for w in (True, False))
    model.weight.data.fill_(0.0)
    decays = []
    for _ in range(20):
        decays.append(warm.next_decay())
        warm.update(model), cold.update(model)
    assert decays[:3] == [1 / 10, 2 / 11, 3 / 12]
    assert warm.module.weight.item() < 1e-6
    assert cold.module.weight.item() == pytest.approx(0.9995**20)
    assert EMATeacher(model, decay=0.2).next_decay() == 0.1
    warm.updates = 10**6
    assert warm.next_decay() == 0.9995


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_averaged_in_float32(dtype, device):
    """In bfloat16 itself, a step of 1 - 0.9995 of the way is rounded away every time."""
    model = nn.Linear(4, 4).to(device, dtype)
    nn.init.zeros_(model.weight)
    teacher = EMATeacher(model, decay=0.9995, warmup=False)
    nn.init.ones_(model.weight)
    for _ in range(1000):
        teacher.update(model)
    expected = torch.full((4, 4), 1 - 0.9995**1000, dtype=torch.float64).to(device, dtype)
    torch.testing.assert_close(teacher.module.weight, expected, rtol=2**-7, atol=0)
    again = EMATeacher(model, decay=0.9995, warmup=False)
    again.load_state_dict(teacher.state_dict())
    teacher.update(model), again.update(model)
    assert torch.equal(again.precise._buffers["weight"], teacher.precise._buffers["weight"])
    assert teacher(torch.ones(1, 4, dtype=dtype, device=device)).dtype == dtype


def test_shared_weights_are_averaged_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].weight.data.fill_(0.0)
    teacher = EMATeacher(model, decay=0.5, warmup=False)
    model[0].weight.data.fill_(1.0)
    teacher.update(model)
    assert (teacher.module[1].weight == 0.5).all()
    assert teacher.module[0].weight is teacher.module[1].weight


def test_masks_with_infinities_are_copied():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    teacher = EMATeacher(model)
    teacher.update(model)
    assert teacher.module.mask.tolist() == [0.0, -float("inf")]


def test_what_is_averaged_is_decided_once():
    """An observer that starts at infinity is copied for good, also after a resume."""
    model = nn.Linear(2, 2)
    model.register_buffer("greatest", torch.tensor(-float("inf")))
    first = EMATeacher(model, decay=0.5, warmup=False)
    model.greatest.fill_(1.0)
    first.update(model)
    second = EMATeacher(model, decay=0.5, warmup=False)
    second.load_state_dict(first.state_dict())
    model.greatest.fill_(3.0)
    first.update(model), second.update(model)
    assert first.module.greatest == second.module.greatest == 3.0


def test_a_cast_that_would_stop_the_average_is_refused():
    model = nn.Linear(2, 2)
    teacher = EMATeacher(model)
    teacher.update(model)
    teacher.bfloat16(), model.bfloat16()
    with pytest.raises(ValueError, match="weight was cast to half precision after"):
        teacher.update(model)
    with pytest.raises(ValueError, match="there; move and cast the model first"):
        teacher.update(model.float())


def test_follows_tensors_that_the_model_replaces():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.zeros(1))
    teacher = EMATeacher(model, decay=0.5, warmup=False)
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
    teacher = EMATeacher(wrap(model), decay=0.0, warmup=False)
    assert type(teacher.module) is nn.Sequential
    teacher.update(wrap(moved(model, 0)))
    assert torch.equal(teacher.module[0].weight, model[0].weight)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_bad_decay(decay):
    with pytest.raises(ValueError, match=r"decay must be within \[0, 1\]"):
        EMATeacher(network(), decay=decay)


def test_another_model_is_refused():
    teacher = EMATeacher(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="only one of them has bias"):
        teacher.update(nn.Linear(2, 2, bias=False))
    with pytest.raises(ValueError, match=r"weight is of shape \(2, 2\) here, \(2, 3\) there"):
        teacher.update(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"weight is torch.float32 on cpu here, .* on meta there"):
        teacher.update(nn.Linear(2, 2, device="meta"))


def test_half_life():
    assert decay_for_half_life(2, 100) ** 200 == pytest.approx(0.5)
    with pytest.raises(ValueError, match="must be positive, got 0 and 10"):
        decay_for_half_life(0, 10)


def test_by_batch_normalises_as_in_training_and_leaves_no_trace():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
    tracking = nn.InstanceNorm2d(4, track_running_stats=True)
    model = nn.Sequential(*layers, tracking, nn.Flatten(), nn.LazyLinear(2))
    x = 2 + torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    model(x)
    teacher = EMATeacher(model)
    before = copy.deepcopy(teacher.state_dict())
    twin = copy.deepcopy(teacher.module).train()
    twin[2].eval()
    outputs = teacher.by_batch(x)
    assert not outputs.requires_grad
    assert torch.equal(outputs, twin(x))
    with pytest.raises(RuntimeError):
        teacher.by_batch(x[:, :2])
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not any(module.training for module in teacher.module.modules())
    assert not torch.allclose(outputs, teacher(x))  # whose statistics are averages
