import copy
from types import MethodType

import pytest
import torch
from problems import conv_network
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import fuse_conv_bn_weights

from saltflat.teacher import FoldedTwin

NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def shaken(model, seed=0):
    """The model as if it had been trained: no statistic and no gain is what it starts as."""
    generator = torch.Generator().manual_seed(seed)

    def randomly(tensor, low, high):
        if tensor is not None:
            random = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(low + (high - low) * random)

    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            randomly(norm.running_mean, -0.5, 0.5)
            randomly(norm.running_var, 0.5, 2.0)
            randomly(norm.weight, 0.5, 1.5)
            randomly(norm.bias, -0.5, 0.5)
    return model


def ready(model, seed=0):
    return shaken(model, seed).double().eval().requires_grad_(False)


def images(side=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, side, side, generator=generator, dtype=torch.float64).to(dtype)


def norms(twin):
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in twin.modules())


def assert_same(twin, module, x):
    torch.testing.assert_close(twin(x), module(x.clone()), rtol=1e-12, atol=1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["cifar_resnet18", "cifar_resnet101", "small_cnn", "resnet18"])
def test_outputs_are_the_modules(name):
    from saltflat.train.models import build_model

    module = ready(build_model(name, num_classes=5))
    twin = FoldedTwin(module)
    assert norms(twin) == 0 and norms(module) > 0
    assert_same(twin, module, images(32 if name == "resnet18" else 8))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True, "without bias"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("options", [{}, {"groups": 3}, {"padding": 1, "padding_mode": "circular"}])
def test_every_kind_of_pair(kind, bias, affine, options):
    conv = kind(3, 6, 3, bias=bias, **options)
    norm = NORMS[kind](6, affine=bool(affine), eps=0.1)
    if affine == "without bias":
        norm.bias = None
    module = ready(nn.Sequential(conv, norm, nn.ReLU()))
    twin = FoldedTwin(module)
    assert norms(twin) == 0
    assert_same(twin, module, torch.randn(2, 3, *[6] * (conv.weight.dim() - 2)).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_folded_weights_are_torchs(dtype, layout):
    module = shaken(conv_network()).eval().to(dtype, memory_format=layout)
    twin = FoldedTwin(module)
    shaken(module, seed=1)
    twin.refresh()
    convs = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    folded = [m for m in twin.modules() if isinstance(m, nn.Conv2d)]
    for conv, norm, ours in zip(
        convs, [m for m in module.modules() if type(m) in NORMS.values()], folded, strict=True
    ):
        weight, bias = fuse_conv_bn_weights(
            *(None if t is None else t.float() for t in (conv.weight, conv.bias)),
            *(norm.running_mean.float(), norm.running_var.float(), norm.eps),
            *(norm.weight.float(), norm.bias.float()),
        )
        assert ours.weight.stride() == conv.weight.stride()
        torch.testing.assert_close(ours.weight, weight.to(dtype))
        torch.testing.assert_close(ours.bias, bias.to(dtype))


def test_refresh_follows_the_module_in_place_and_keeps_no_gradient():
    module = ready(conv_network())
    twin = FoldedTwin(module)
    where = [p.data_ptr() for p in twin.parameters()]
    for parameter in shaken(module, 3).parameters():
        parameter.mul_(1.1)
    assert not torch.allclose(twin(images()), module(images()))
    twin.refresh()
    assert_same(twin, module, images())
    assert [p.data_ptr() for p in twin.parameters()] == where
    assert not any(p.requires_grad for p in twin.parameters())
    assert twin.nbytes == sum(
        8 * (m.weight.numel() + len(m.weight)) for m in module.modules() if isinstance(m, nn.Conv2d)
    )


def test_other_tensors_are_shared():
    module = ready(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)))
    twin = FoldedTwin(module)
    assert any(p is module[2].weight for p in twin.parameters())


class Block(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x, power=None):
        return self.change(self, x, lambda: self.norm(self.conv(x)))


def in_place(y, x):
    y += x
    return y


def alias(_, x, y):
    x = x.clone()
    in_place(x, 1.0)
    return in_place(y(), x) + x


@pytest.mark.parametrize(
    "change",
    [
        alias,
        lambda _, x, y: F.relu(in_place(y(), x), inplace=True),
        lambda _, x, y: x.clone().add_(y()),
        lambda _, x, y: y() + x.mean((2, 3), keepdim=True),
        lambda block, x, y: y() * (2 * block.scale) + block.conv.weight.sum(),
    ],
)
def test_what_is_around_a_pair_stays(change):
    module = ready(Block(change))
    twin = FoldedTwin(module)
    assert norms(twin) == 0
    module.scale += 1
    assert_same(twin, module, images())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x):
        first = self.convs[0](x)
        second = self.norms[1](self.convs[1](self.norms[0](first)))
        third = self.convs[2](self.norms[2](self.convs[2](x)))
        return first + second + third


def test_what_is_used_twice_stays():
    module = ready(Twice())
    twin = FoldedTwin(module)
    assert norms(twin) == 2
    assert_same(twin, module, images())


class Branch(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Constant(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


def pair(kind=nn.Sequential, **options):
    return kind(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, **options))


def hooked(module):
    module[0].register_forward_hook(lambda *_: None)
    return module


def with_own_forward(module):
    module[0].forward = MethodType(lambda self, x: 2 * x, module[0])
    return module


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (pair(Branch), "trace"),
        (pair(Constant), "tensors of its own"),
        (hooked(pair()), "hooks"),
        (with_own_forward(pair()), "no BatchNorm"),
        (pair(track_running_stats=False), "no BatchNorm"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)), "no BatchNorm"),
        (nn.Sequential(nn.Linear(8, 2)), "no BatchNorm"),
    ],
)
def test_what_cannot_be_folded_is_refused_and_left_alone(module, why):
    module.eval()
    keys = [set(vars(m)) for m in module.modules()]
    with pytest.raises(ValueError, match=why):
        FoldedTwin(module)
    assert [set(vars(m)) for m in module.modules()] == keys


def test_train_mode_is_refused():
    module = pair().eval()
    module[1].train()
    with pytest.raises(ValueError, match="eval mode"):
        FoldedTwin(module)


class Remembers(nn.Sequential):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_tracing_leaves_no_mark():
    module = pair(Remembers).double().eval()
    twin = FoldedTwin(module)
    assert "last" not in vars(module)
    assert_same(twin, module, images())
    assert_same(copy.deepcopy(twin), module, images())
