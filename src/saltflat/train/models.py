"""The networks of the papers, for small images; every other name is timm's.

All are a stem, stages of residual blocks and a head, and differ in the block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.train.config import nearest


def _conv(width_in: int, width: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width, kernel, stride, padding=kernel // 2, bias=False)


def _conv_norm(width_in: int, width: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(_conv(width_in, width, kernel, stride), nn.BatchNorm2d(width))


def _conv_norm_relu(width_in: int, width: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return _conv_norm(width_in, width, kernel, stride).append(nn.ReLU())


def _head(width: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + residual(x)); the shortcut is a 1x1 convolution where the shape changes.

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 3.
    """

    def __init__(self, residual: nn.Module, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        same = width_in == width and stride == 1
        self.residual = residual
        self.shortcut = nn.Identity() if same else _conv_norm(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


def _basic(width_in: int, width: int, stride: int) -> ResidualBlock:
    """Two 3x3 convolutions: figure 5, left."""
    residual = nn.Sequential(
        _conv_norm_relu(width_in, width, 3, stride), _conv_norm(width, width, 3)
    )
    return ResidualBlock(residual, width_in, width, stride)


def _bottleneck(width_in: int, width: int, stride: int) -> ResidualBlock:
    """A 3x3 convolution between two of 1x1, at a quarter of the width: figure 5, right."""
    residual = nn.Sequential(
        _conv_norm_relu(width_in, width // 4, 1),
        _conv_norm_relu(width // 4, width // 4, 3, stride),  # the stride here: ResNet "v1.5"
        _conv_norm(width // 4, width, 1),
    )
    return ResidualBlock(residual, width_in, width, stride)


class WideBlock(nn.Module):
    """Pre-activation: a = relu(norm(x)), then x + residual(a), or where the shape changes
    conv(a) + residual(a).

    References:
        He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016, figure 4(e).
        Zagoruyko and Komodakis, "Wide Residual Networks", BMVC 2016, figure 1(c).
    """

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        same = width_in == width and stride == 1
        self.norm = nn.BatchNorm2d(width_in)
        self.residual = nn.Sequential(
            _conv_norm_relu(width_in, width, 3, stride), _conv(width, width)
        )
        self.shortcut = None if same else _conv(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norm(x))
        return (x if self.shortcut is None else self.shortcut(a)) + self.residual(a)


class PyramidBlock(nn.Module):
    """norm, conv, norm, relu, conv, norm; the shortcut has no parameters: new channels are zero.

    Reference:
        Han, Kim and Kim, "Deep Pyramidal Residual Networks", CVPR 2017.
    """

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.widen, self.stride = width - width_in, stride
        self.residual = nn.Sequential(
            nn.BatchNorm2d(width_in),
            _conv_norm_relu(width_in, width, 3, stride),
            _conv_norm(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        # ceil_mode: an odd side is halved as the convolution halves it.
        shortcut = x if self.stride == 1 else F.avg_pool2d(x, self.stride, ceil_mode=True)
        return F.pad(shortcut, (0, 0, 0, 0, 0, self.widen)) + self.residual(x)


def _stack(
    net: nn.Sequential,
    width: int,
    block: Callable[[int, int, int], nn.Module],
    stages: Iterable[Iterable[int]],
) -> nn.Sequential:
    """Append blocks of these widths; every stage but the first begins with a stride of 2."""
    for i, widths in enumerate(stages):
        for j, width_out in enumerate(widths):
            net.append(block(width, width_out, 2 if i > 0 and j == 0 else 1))
            width = width_out
    return net


def _small_cnn(in_channels: int, num_classes: int) -> nn.Sequential:
    first, second = _conv_norm_relu(in_channels, 32), _conv_norm_relu(32, 64)
    third = _conv_norm_relu(64, 64)
    return nn.Sequential(first, second, nn.MaxPool2d(2), third, _head(64, num_classes))


def _resnet18(in_channels: int, num_classes: int, width: int = 64) -> nn.Sequential:
    # The stem for small images, here and below: 3x3, no stride, no pooling.
    stages = [[width * 2**i] * 2 for i in range(4)]
    net = _stack(nn.Sequential(_conv_norm_relu(in_channels, width)), width, _basic, stages)
    return net.append(_head(8 * width, num_classes))


def _resnet101(in_channels: int, num_classes: int) -> nn.Sequential:
    stages = [256] * 3, [512] * 4, [1024] * 23, [2048] * 3
    net = _stack(nn.Sequential(_conv_norm_relu(in_channels, 64)), 64, _bottleneck, stages)
    return net.append(_head(2048, num_classes))


def _wrn28_10(in_channels: int, num_classes: int) -> nn.Sequential:
    # 28 = 6 n + 4: n = 4 blocks a stage; 16, 32, 64 channels, times 10.
    stages = [160] * 4, [320] * 4, [640] * 4
    net = _stack(nn.Sequential(_conv(in_channels, 16)), 16, WideBlock, stages)
    return net.extend((nn.BatchNorm2d(640), nn.ReLU(), _head(640, num_classes)))


def _pyramidnet110(in_channels: int, num_classes: int) -> nn.Sequential:
    # 110 = 6 n + 2: n = 18 blocks a stage; each wider by alpha / N = 270 / 54 = 5 (additive).
    stages = range(21, 107, 5), range(111, 197, 5), range(201, 287, 5)
    net = _stack(nn.Sequential(_conv_norm(in_channels, 16)), 16, PyramidBlock, stages)
    return net.extend((nn.BatchNorm2d(286), nn.ReLU(), _head(286, num_classes)))


_OWN: dict[str, tuple[Callable[[int, int], nn.Sequential], str]] = {
    "small_cnn": (_small_cnn, "three convolutions, for the 8x8 digits"),
    "cifar_resnet18": (_resnet18, "ResNet-18 with the stem for 32x32 images"),
    "cifar_resnet18_narrow": (partial(_resnet18, width=16), "the same, a quarter as wide"),
    "cifar_resnet101": (_resnet101, "ResNet-101 with the stem for 32x32 images"),
    "wrn28_10": (_wrn28_10, "Wide ResNet 28-10, no dropout"),
    "pyramidnet110": (_pyramidnet110, "PyramidNet-110, alpha 270, basic blocks"),
}
MODELS: dict[str, str] = {name: description for name, (_, description) in _OWN.items()}
"""Saltflat's own models, and what they are."""


def _initialize(net: nn.Module) -> None:
    """Convolutions from N(0, 2 / fan_out); the classifier's bias starts at zero.

    Reference:
        He et al., "Delving Deep into Rectifiers", ICCV 2015, equation 14.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def _from_timm(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise ImportError(
            f"model {name!r} is not one of Saltflat's own ({nearest(name, MODELS)}); "
            "for timm's: pip install 'saltflat[train]'"
        ) from error
    if not timm.is_model(name):
        hint = nearest(name, [*MODELS, *timm.list_models()]).partition("Known:")[0]
        raise ValueError(
            f"unknown model {name!r}: {hint}Known: {', '.join(sorted(MODELS))}, or any of timm's"
        )
    shape = {"num_classes": num_classes, "in_chans": in_channels}
    try:
        return timm.create_model(name, **shape, img_size=image_size)
    except TypeError as error:  # convolutional: takes images of any size, and no such argument
        if "img_size" not in str(error):
            raise
    return timm.create_model(name, **shape)


def build_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    initialization: Literal["he", "torch"] = "he",
) -> nn.Module:
    """A model with fresh weights, by name.

    Args:
        name: One of `MODELS`, or any name of timm's.
        num_classes: How many outputs.
        in_channels: Channels of the images.
        image_size: Their side in pixels; of use to timm's transformers only, the others take any.
        initialization: Of one of `MODELS`. "he": convolutions from N(0, 2 / fan_out), a bias of
            zero; "torch": every layer as PyTorch makes it. timm's have their own.

    Returns:
        The model, on torch's default device.

    Raises:
        ValueError: If there is no such model, or a number is not positive.
        ImportError: If it is not one of `MODELS` and timm is not installed.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = build_model("cifar_resnet18", num_classes=10)
        >>> sum(p.numel() for p in model.parameters())
        11173962
    """
    sizes = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    for argument, value in sizes.items():
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if name not in _OWN:
        return _from_timm(name, num_classes, in_channels, image_size)
    net = _OWN[name][0](in_channels, num_classes)
    if initialization == "he":
        _initialize(net)
    return net
