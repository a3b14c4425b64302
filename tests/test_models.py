"""The models are those of the papers: their parameters are counted, their blocks recomputed."""

import math
import sys

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

from saltflat.train.models import MODELS, PyramidBlock, WideBlock, build_model


def resnet18_parameters(width):
    """The convolutions of 3x3 and, in the shortcuts, of 1x1; BatchNorm; the classifier."""
    later = [2 * width, 4 * width, 8 * width]
    convolutions = 9 * (3 * width + 4 * width**2) + sum(9 * 3.5 * u**2 + u**2 / 2 for u in later)
    return int(convolutions) + 2 * (5 * width + 5 * sum(later)) + 10 * (8 * width + 1)


# At 10 classes and 3 channels.
PARAMETERS = {
    "small_cnn": 3 * 32 * 9 + 32 * 64 * 9 + 64 * 64 * 9 + 2 * (32 + 64 + 64) + 65 * 10,
    "cifar_resnet18": 11_173_962,
    "cifar_resnet18_narrow": resnet18_parameters(16),
    "cifar_resnet101": 42_512_970,
    "wrn28_10": 36_479_194,
    "pyramidnet110": 28_485_477,
}
# Convolutions outside of shortcuts, and the classifier. "28" counts three shortcuts in its place.
LAYERS = {
    "cifar_resnet18": 18,
    "cifar_resnet18_narrow": 18,
    "cifar_resnet101": 101,
    "wrn28_10": 28 - 3 + 1,
    "pyramidnet110": 110,
}


def on_meta(name, **kwargs):
    with torch.device("meta"):
        return build_model(name, **kwargs)


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_every_own_model_is_counted_and_described():
    assert PARAMETERS.keys() == MODELS.keys()
    assert resnet18_parameters(64) == PARAMETERS["cifar_resnet18"]
    assert all(text and "\n" not in text for text in MODELS.values())


@pytest.mark.parametrize("name", MODELS)
def test_own_models_have_the_papers_parameters(name):
    model = on_meta(name, num_classes=10)
    assert count(model) == PARAMETERS[name]
    assert not any(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d))
    # A channel fewer and a class more change the first and the last layer alone.
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    other = on_meta(name, num_classes=11, in_channels=2)
    assert count(other) - count(model) == last.in_features + 1 - 9 * first.out_channels


@pytest.mark.parametrize("name", LAYERS)
def test_the_number_in_the_name_is_the_depth(name):
    model = on_meta(name, num_classes=10)
    layers = [
        key
        for key, m in model.named_modules()
        if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in key
    ]
    assert len(layers) == LAYERS[name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [32, 28, 9])
def test_any_image_size_gives_logits(name, size):
    model = on_meta(name, num_classes=7, in_channels=1)
    assert model(torch.empty(2, 1, size, size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("small_cnn", 1, 8), ("small_cnn", 3, 32), ("cifar_resnet18", 3, 32)],
)
def test_every_parameter_gets_a_gradient(name, channels, size, device):
    torch.manual_seed(0)
    model = build_model(name, num_classes=10, in_channels=channels).to(device)
    logits = model(torch.randn(2, channels, size, size, device=device))
    assert logits.shape == (2, 10)
    cross_entropy(logits, torch.tensor([3, 8], device=device)).backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


@pytest.mark.parametrize("name", ["wrn28_10", "pyramidnet110"])
@torch.no_grad()
def test_the_deep_models_start_with_finite_logits(name):
    torch.manual_seed(0)
    logits = build_model(name, num_classes=10)(torch.randn(2, 3, 16, 16))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("name", ["small_cnn", "cifar_resnet18"])
def test_initialisation_is_hes(name):
    torch.manual_seed(0)
    model = build_model(name, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        elif isinstance(module, nn.Linear):
            assert (module.bias == 0).all()
        elif isinstance(module, nn.Conv2d):
            weight, fan_out = module.weight, module.out_channels * module.kernel_size[0] ** 2
            # The deviation of n normal numbers is known to 1 / sqrt(2 n); allow four of these.
            near = 4 / math.sqrt(2 * weight.numel())
            assert weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=near)


def test_initialisation_can_be_torchs_own():
    torch.manual_seed(3)
    expected = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.Conv2d(32, 64, 3, bias=False)]
    torch.manual_seed(3)
    model = build_model("small_cnn", num_classes=10, in_channels=1, initialization="torch")
    for module, own in zip(expected, [model[0][0], model[1][0]], strict=True):
        assert torch.equal(module.weight, own.weight)
    assert (model[-1][-1].bias != 0).any()


def test_a_seed_is_the_weights():
    torch.manual_seed(5)
    first = build_model("small_cnn", num_classes=10).state_dict()
    torch.manual_seed(5)
    second = build_model("small_cnn", num_classes=10).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["cifar_resnet18", "cifar_resnet101"])
@torch.no_grad()
def test_resnets_compute_what_timms_do(name):
    """With its stem replaced, timm's ResNet has the same tensors in the same order."""
    torch.manual_seed(0)
    own = build_model(name, num_classes=10)
    theirs = timm.create_model(name.removeprefix("cifar_"), num_classes=10)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    theirs.load_state_dict(
        dict(zip(theirs.state_dict(), own.state_dict().values(), strict=True)), assign=True
    )
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(own(x), theirs(x))


def norm(x):
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt()


@pytest.mark.parametrize("stride", [1, 2])
@torch.no_grad()
def test_a_wide_block_is_pre_activated(stride):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    a = norm(x).relu()

    block = WideBlock(4, 8, stride).double()
    one, two = (m.weight for m in block.residual.modules() if isinstance(m, nn.Conv2d))
    residual = conv2d(norm(conv2d(a, one, stride=stride, padding=1)).relu(), two, padding=1)
    projected = conv2d(a, block.shortcut.weight, stride=stride)
    torch.testing.assert_close(block(x), projected + residual)

    block = WideBlock(4, 4, 1).double()
    nn.init.zeros_(block.residual[-1].weight)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("stride", [1, 2])
@torch.no_grad()
def test_a_pyramid_block_pads_its_shortcut_with_zeros(stride):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    block = PyramidBlock(4, 9, stride).double()
    one, two = (m.weight for m in block.residual.modules() if isinstance(m, nn.Conv2d))
    expected = norm(
        conv2d(norm(conv2d(norm(x), one, stride=stride, padding=1)).relu(), two, padding=1)
    )
    expected[:, :4] += x.unflatten(2, (-1, stride)).unflatten(4, (-1, stride)).mean((3, 5))
    torch.testing.assert_close(block(x), expected)


def test_pyramidnet_widens_by_five_and_halves_twice():
    blocks = [
        m for m in on_meta("pyramidnet110", num_classes=10).modules() if isinstance(m, PyramidBlock)
    ]
    assert [b.widen for b in blocks] == [5] * 54
    assert [k for k, b in enumerate(blocks) if b.stride == 2] == [18, 36]


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet50", 25_557_032), ("vit_small_patch32_224", 22_878_952)]
)
def test_other_names_are_timms(name, parameters):
    model = on_meta(name, num_classes=1000, image_size=224)
    assert count(model) == parameters


def test_timms_models_are_built_for_the_images():
    vit = on_meta("vit_small_patch32_224", num_classes=5, in_channels=1, image_size=64)
    assert vit(torch.empty(2, 1, 64, 64, device="meta")).shape == (2, 5)
    resnet = on_meta("resnet10t", num_classes=5, in_channels=1, image_size=64)
    assert resnet(torch.empty(2, 1, 64, 64, device="meta")).shape == (2, 5)


def test_a_type_error_of_timms_own_is_not_hidden(monkeypatch):
    def broken(*args, **kwargs):
        raise TypeError("something else")

    monkeypatch.setattr(timm, "create_model", broken)
    with pytest.raises(TypeError, match="something else"):
        build_model("resnet50", num_classes=10)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("wrn28-10", "wrn28_10"), ("vit_smal_patch32_224", "vit_small_patch32_224")],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong, meant):
    with pytest.raises(
        ValueError, match=f"unknown model '{wrong}': did you mean '{meant}'"
    ) as info:
        build_model(wrong, num_classes=10)
    message = str(info.value)
    assert message.endswith(f"Known: {', '.join(sorted(MODELS))}, or any of timm's")


def test_a_name_like_no_other_gets_no_guess():
    with pytest.raises(ValueError, match=r"unknown model '§§': Known: .* or any of timm's$"):
        build_model("§§", num_classes=10)


def test_without_timm_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"'resnet50'.*pip install 'saltflat\[train\]'"):
        build_model("resnet50", num_classes=10)
    with pytest.raises(ImportError, match="did you mean 'wrn28_10'"):
        build_model("wrn28-10", num_classes=10)
    assert count(on_meta("small_cnn", num_classes=10)) == PARAMETERS["small_cnn"]


@pytest.mark.parametrize("argument", ["num_classes", "in_channels", "image_size"])
def test_sizes_must_be_positive(argument):
    with pytest.raises(ValueError, match=f"{argument} must be at least 1, got 0"):
        build_model("small_cnn", **{"num_classes": 10, argument: 0})
