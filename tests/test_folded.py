import copy
import io
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from saltflat import MESA, EMATeacher
from saltflat.train.models import PyramidBlock, WideBlock, _stack, build_model

NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def shaken(model, seed=0):
    """The model as if it had been trained: no statistic and no gain is what it starts as."""
    generator = torch.Generator().manual_seed(seed)

    def randomly(tensor, low, high):
        if tensor is not None:
            random = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(low + (high - low) * random)

    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, NORMS)):
            randomly(norm.running_mean, -0.5, 0.5)
            randomly(norm.running_var, 0.5, 2.0)
            randomly(norm.weight, 0.5, 1.5)
            randomly(norm.bias, -0.5, 0.5)
    return model


def images(side=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, side, side, generator=generator, dtype=torch.float64).to(dtype)


def folded(model):
    """A teacher that folds, and one that does not."""
    teacher, plain = EMATeacher(model, decay=0.5, warmup=False), EMATeacher(model)
    plain.decay, plain.warmup = 0.5, False
    assert teacher.fold()
    return teacher, plain


def same(teacher, plain, x):
    """Whether both have the same outputs, and the teacher's twin made its."""
    calls = []
    hook = teacher.register_forward_pre_hook(
        lambda module, inputs: calls.append(twin(module, *inputs))
    )
    got, expected = teacher(x), plain(x)
    hook.remove()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    return calls[0] is not None


def twin(teacher, x):
    return teacher._folding.twin(teacher.module, (x,), {})


def sites(teacher):
    """How many convolutions are folded, and how many of them with a ReLU."""
    found = teacher._folding._program.sites
    return len(found), sum(site.relu for site in found)


class Block(nn.Module):
    """relu(norm(conv(x)) + shortcut), added in a way to choose."""

    def __init__(self, add, relu=torch.relu):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.add, self.relu = add, relu

    def forward(self, x):
        return self.relu(self.add(self.norm(self.conv(x)), x))


def wide():
    return _stack(nn.Sequential(nn.Conv2d(3, 4, 3)), 4, WideBlock, [[8] * 2, [16] * 2])


def pyramid():
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    return _stack(stem, 4, PyramidBlock, [[6, 8], [10, 12]])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: build_model("cifar_resnet18", num_classes=5), (20, 17)),
        (lambda: build_model("cifar_resnet101", num_classes=5), (104, 100)),
        (lambda: build_model("small_cnn", num_classes=5), (3, 3)),
        (lambda: build_model("resnet18", num_classes=5), (20, 17)),  # timm's, which adds in place
        (wide, (5, 5)),  # the stem too: the first block begins with a norm
        (pyramid, (9, 4)),
    ],
    ids=["resnet18", "resnet101", "small", "timm", "wide", "pyramid"],
)
def test_outputs_are_the_modules(build, expected):
    teacher, plain = folded(shaken(build().double()))
    assert sites(teacher) == expected
    assert same(teacher, plain, images(32 if expected == (20, 17) else 8))


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32])
def test_outputs_are_close_under_autocast(own):
    model = shaken(build_model("small_cnn", num_classes=5)).to(own)
    exact = copy.deepcopy(model).double().eval()(images())
    teacher, plain = folded(model)
    x = images(dtype=own)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = teacher(x), plain(x)
        weights = {f.weight.dtype for f in twin(teacher, x)._folded}
    assert got.dtype == expected.dtype == torch.bfloat16
    assert weights == {torch.bfloat16}
    assert (got - exact).norm() < 0.01 * exact.norm()
    assert (expected - exact).norm() < 0.01 * exact.norm()


def test_the_precision_is_that_of_the_call():
    model = shaken(build_model("small_cnn", num_classes=5))
    teacher, plain = folded(model)
    x = images(dtype=torch.float32)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert teacher(x).dtype == torch.bfloat16
        torch.testing.assert_close(teacher(x), plain(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 3}, {"padding": "same", "dilation": 2}, {"stride": 2, "padding": 1}]
)
def test_every_kind_of_pair(bias, affine, norm, options):
    conv = nn.Conv2d(3, 6, 3, bias=bias, **options)
    model = nn.Sequential(conv, norm(6, affine=affine, eps=0.1), nn.ReLU())
    teacher, plain = folded(shaken(model.double()))
    assert same(teacher, plain, images())


def in_place(y, x):
    y += x
    return y


@pytest.mark.parametrize(
    ("add", "fuses"),
    [
        (lambda y, x: y + x, True),
        (lambda y, x: x + y, True),
        (lambda y, x: torch.add(y, x), True),
        (lambda y, x: y.add_(x), True),
        (in_place, True),
        (lambda y, x: torch.add(x, y, alpha=2), False),
        (lambda y, x: y + y, False),
        (lambda y, x: y + 1.0, False),
        (lambda y, x: in_place(x.clone(), y), False),
        (lambda y, x: x.clone().add_(y), False),
        (lambda y, x: y + x.mean((2, 3), keepdim=True), True),
    ],
)
@pytest.mark.parametrize("relu", [torch.relu, lambda y: F.relu(y, inplace=True), nn.ReLU()])
def test_sums_that_a_convolution_takes_in(add, fuses, relu):
    teacher, plain = folded(shaken(Block(add, relu).double()))
    assert sites(teacher) == (1, int(fuses))
    assert same(teacher, plain, images())


class Twice(nn.Module):
    """Outputs that are used twice: of a convolution, of a normalisation, of a sum."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x):
        first = self.convs[0](x)
        second = self.norms[1](self.convs[1](self.norms[0](first)))
        third = self.norms[2](self.convs[2](x)) + x
        return first + F.relu(second) - second + F.relu(third) * third


def test_what_is_used_twice_stays():
    teacher, plain = folded(shaken(Twice().double()))
    assert sites(teacher) == (2, 0)
    assert same(teacher, plain, images())


class Moved(nn.Module):
    """The convolution's input is changed between it and the sum."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        x = x.clone()
        y = self.norm(self.conv(x))
        self.change(x)
        return F.relu(y + x)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2.0),
        lambda x: in_place(x, 1.0),
        lambda x: F.relu(x, inplace=True),
        lambda x: torch.relu_(x),
        lambda x: torch.mul(x, 2.0, out=x),
        nn.ReLU(inplace=True),
    ],
)
def test_a_convolution_does_not_move_past_a_change_of_its_input(change):
    teacher, plain = folded(shaken(Moved(change).double()))
    assert sites(teacher) == (1, 0)
    assert same(teacher, plain, images())


def test_a_shared_module_is_folded_at_each_call():
    conv, norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    model = nn.Sequential(conv, norm, nn.ReLU(), conv, nn.BatchNorm2d(3), conv, norm)
    teacher, plain = folded(shaken(model.double()))
    assert sites(teacher) == (3, 1)
    assert len(twin(teacher, images())._folded) == 2
    assert same(teacher, plain, images())


class Optional(nn.Sequential):
    def forward(self, x, scale=None):
        x = super().forward(x)
        return x if scale is None else x * scale


def test_calls_with_other_arguments_are_the_modules():
    pair = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    teacher, plain = folded(shaken(Optional(*pair).double()))
    x = images()
    assert same(teacher, plain, x)
    assert torch.equal(teacher(x, scale=2.0), plain(x, scale=2.0))
    assert torch.equal(teacher(x, 2.0), plain(x, 2.0))
    with pytest.raises(TypeError):
        teacher()


class Branch(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Constant(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


class Remembers(nn.Sequential):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class FullPrecision(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def pair_in(kind):
    return kind(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))


@pytest.mark.parametrize(
    "model",
    [
        *(pair_in(kind) for kind in (Branch, Constant, Remembers, FullPrecision)),
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)),
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)),
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(3)),
        nn.Sequential(nn.Linear(8, 2)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_what_cannot_be_folded_runs_as_it_is(model):
    teacher = EMATeacher(model)
    keys = [set(vars(module)) for module in teacher.modules()]
    assert not teacher.fold()
    assert [set(vars(module)) for module in teacher.modules()] == keys
    torch.manual_seed(0)
    got = teacher(images(dtype=torch.float32))
    torch.manual_seed(0)
    assert torch.equal(got, copy.deepcopy(model).eval()(images(dtype=torch.float32)))


def test_hooks_and_train_mode_are_honoured():
    teacher, plain = folded(shaken(build_model("small_cnn", num_classes=5).double()))
    seen = []
    for module in (teacher.module, teacher.module[1], teacher.module[0][0]):
        hook = module.register_forward_hook(lambda module, inputs, output: seen.append(module))
        assert not same(teacher, plain, images())
        assert seen.pop() is module
        hook.remove()
        assert same(teacher, plain, images())
    teacher.module[0][1].train(), plain.module[0][1].train()
    assert not same(teacher, plain, images())
    teacher.module.register_forward_hook(print)
    assert not teacher.fold()


def test_parts_that_are_replaced_are_honoured():
    teacher, plain = folded(shaken(build_model("small_cnn", num_classes=5).double()))
    assert same(teacher, plain, images())
    for each in (teacher, plain):
        each.module[3] = nn.Identity().eval()
    assert not same(teacher, plain, images())
    assert teacher.fold() and same(teacher, plain, images())


def test_the_twin_follows_updates():
    model = shaken(build_model("small_cnn", num_classes=5).double())
    teacher, plain = folded(model)
    first = teacher(images())
    weights = [f.weight for f in twin(teacher, images())._folded]
    for seed in range(3):
        shaken(model, seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        teacher.update(model), plain.update(model)
        assert same(teacher, plain, images())
        conv, norm, _ = plain.module[0]
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        torch.testing.assert_close(weights[-1], conv.weight * scale.view(-1, 1, 1, 1))
    assert all(w is f.weight for w, f in zip(weights, twin(teacher, images())._folded, strict=True))
    assert not torch.allclose(teacher(images()), first)


def test_the_twin_follows_other_changes():
    model = shaken(build_model("small_cnn", num_classes=5).double())
    teacher, plain = folded(model)
    x = images()
    assert same(teacher, plain, x)
    other = EMATeacher(shaken(build_model("small_cnn", num_classes=5).double(), 7))
    for assign in (False, True):
        for each in (teacher, plain):
            each.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        assert same(teacher, plain, x)
        other.module[0][0].weight.mul_(2)
    for each in (teacher, plain):
        each.module[0][0].weight.mul_(-1)
        each.module[0][1].running_var.mul_(2)
    assert same(teacher, plain, x)
    for each in (teacher, plain):
        each.module[0][0].weight = nn.Parameter(torch.ones_like(each.module[0][0].weight))
    assert same(teacher, plain, x)
    teacher.float(), plain.float()
    torch.testing.assert_close(teacher(x.float()), plain(x.float()))
    assert twin(teacher, x.float())._folded[0].weight.dtype == torch.float32
    teacher.double(), plain.double()
    teacher.to(memory_format=torch.channels_last)
    assert same(teacher, plain, x)
    for each in (teacher, plain):
        each.module[0][1].running_mean = each.module[0][1].running_var = None
    assert not same(teacher, plain, x)


def test_changes_that_nobody_counts_are_seen_when_a_cast_made_them():
    """As .half().float(), if the memory is the same in the end."""
    teacher, plain = folded(shaken(build_model("small_cnn", num_classes=5).double()))
    assert same(teacher, plain, images())
    for each in (teacher, plain):
        each._apply(lambda tensor: tensor.data.mul_(2) if tensor.dim() == 4 else tensor)
    assert same(teacher, plain, images())


def test_a_replay_that_does_not_refresh_outdates_the_twin():
    """As a CUDA graph that was captured before fold(): it changes tensors, and nobody counts."""
    model = shaken(build_model("small_cnn", num_classes=5).double())
    teacher, plain = folded(model)
    teacher.update(model), plain.update(model)
    assert same(teacher, plain, images())
    teacher.before_replay()
    for each in (teacher, plain):
        each.module[0][0].weight.data.mul_(2)
    assert same(teacher, plain, images())


def test_inference_mode_leaves_no_mark():
    model = shaken(build_model("small_cnn", num_classes=5).double())
    teacher, plain = folded(model)
    with torch.inference_mode():
        teacher(images())
    shaken(model, 3)
    teacher.update(model), plain.update(model)
    assert same(teacher, plain, images())


def test_the_twin_is_no_part_of_the_teacher():
    teacher, plain = folded(shaken(build_model("small_cnn", num_classes=5).double()))
    teacher(images())
    assert teacher.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in teacher.named_modules()] == [n for n, _ in plain.named_modules()]
    assert len(list(teacher.parameters())) == len(list(plain.parameters()))
    file = io.BytesIO()
    torch.save(teacher, file)
    plain_file = io.BytesIO()
    torch.save(plain, plain_file)
    assert abs(len(file.getvalue()) - len(plain_file.getvalue())) < 1024
    file.seek(0)
    for twin_of_it in (copy.deepcopy(teacher), torch.load(file, weights_only=False)):
        assert twin_of_it._folding is None
        torch.testing.assert_close(twin_of_it(images()), plain(images()), rtol=0, atol=0)
        assert twin_of_it.fold() and same(twin_of_it, plain, images())
    assert same(teacher, plain, images())


def test_torch_compile_compiles_the_module():
    teacher, plain = folded(shaken(build_model("small_cnn", num_classes=5).double()))
    compiled = torch.compile(teacher, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images()), plain(images()))


def test_mesas_loss_is_the_same():
    model = shaken(build_model("small_cnn", num_classes=5).double())
    mesa = MESA(model, start_epoch=0)
    mesa.set_epoch(0)
    shaken(model, 4)
    mesa.update(model)
    x = images()
    expected = mesa(model(x), x)
    assert mesa.teacher.fold()
    torch.testing.assert_close(mesa(model(x), x), expected, rtol=1e-9, atol=1e-12)
    assert expected > 1e-4


INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch import nn
from test_folded import shaken
from saltflat import _average, _convolution
from saltflat._traced import Pair

torch.manual_seed(0)
kinds = [(3, 8, 3, 1, False, True), (16, 40, 3, 1, True, True), (64, 48, 1, 1, True, False),
         (6, 6, 5, 3, False, False), (1, 1, 1, 1, False, True)]
for memory_format in (torch.contiguous_format, torch.channels_last):
    pairs = []
    for width, out, kernel, groups, bias, affine in kinds:
        conv = nn.Conv2d(width, out, kernel, groups=groups, bias=bias).requires_grad_(False)
        norm = shaken(nn.BatchNorm2d(out, affine=affine, eps=10.0 ** -len(pairs)))
        pairs.append(Pair(conv.to(memory_format=memory_format), norm.requires_grad_(False)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours, theirs = ([_convolution.Folded(pair, dtype) for pair in pairs] for _ in range(2))
        assert all(_convolution._plain(f, torch.device("cpu")) for f in ours)
        refreshing = _convolution.Refreshing(ours)
        for aligned in (True, False):
            refreshing._aligned = aligned
            for f in ours:
                f.weight.fill_(torch.nan), f.bias.fill_(torch.nan)
            refreshing()
            for mine, other in zip(ours, theirs):
                other.refresh()
                tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7}
                torch.testing.assert_close(mine.weight, other.weight, **tolerance)
                torch.testing.assert_close(mine.bias, other.bias, **tolerance)

_average._plain = lambda v, x: True
for first in (0, 1):  # the second is not aligned
    a = [torch.randn(size + first)[first:] for size in (5000, 4096, 21, 1)]
    b = [torch.randn_like(t) for t in a]
    for weight in (0.3, 0.9, 1.0, 0.0):
        c = [torch.cat([t[:first], t])[first:] for t in a]
        averaging = _average.Averaging(c, b, [False] * 4, lasting=True)
        averaging(c, b, torch.tensor(weight, dtype=torch.float64), None)
        for mine, old, new in zip(c, a, b):
            torch.testing.assert_close(mine, torch.lerp(old, new, weight), rtol=0, atol=1e-6)
    assert averaging._aligned == (first == 0), first
print("equal")
"""


def test_the_kernels_do_what_torch_does():
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stdout.split() == ["equal"], result.stderr


@pytest.mark.parametrize(
    "options", [{}, {"stride": (2, 3)}, {"padding": (1, 2)}, {"dilation": 2, "padding": 1}]
)
def test_the_shape_that_a_sum_must_have(options):
    """cuDNN would read past the end of one that has another."""
    teacher = EMATeacher(nn.Sequential(nn.Conv2d(3, 6, (3, 2), **options), nn.BatchNorm2d(6)))
    assert teacher.fold()
    x = torch.randn(2, 3, 9, 10)
    (convolution,) = twin(teacher, x)._convolutions
    assert convolution._shape(x) == teacher(x).shape
