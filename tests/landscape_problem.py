"""A model and data for the tests of loss surfaces, and the definition of a surface."""

from itertools import product

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat.core.perturb import displaced


class Residual(nn.Module):
    """A network with convolutions that can be folded and one that cannot, a sum, tied weights and
    a buffer that is not a statistic."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.again = self.body[0]
        self.point = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(6, 5)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.body(x)) + self.again(x)
        return self.head(self.point(x).mean((2, 3))) * self.scale


def images(rows=20):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 3, 6, 6, generator=generator)
    return x, torch.randint(5, (rows,), generator=generator)


def used(model, x, y, seed=0):
    """The model after five steps, so that it has statistics and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        cross_entropy(model(x + 0.1 * seed), y).backward()
        optimizer.step()
    return model


def residual(seed=0):
    torch.manual_seed(seed)
    return used(Residual(), *images(), seed)


def one_at_a_time(model, x, y, directions, points, *, batch=False):
    """The definition: displace the model's tensors, evaluate, restore."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    modes = {module: module.training for module in model.modules()}
    found = []
    for point in points.tolist():
        tensors = [named[name] for name in directions.axes[0]]
        offsets = [
            sum(c * axis[name] for c, axis in zip(point, directions.axes, strict=True))
            for name in directions.axes[0]
        ]
        model.eval()
        for module in model.modules():
            if batch and isinstance(module, nn.BatchNorm2d):
                module.train()
                module.track_running_stats = False
        with torch.no_grad(), displaced(tensors, offsets):
            outputs = model(x)
        for module, mode in modes.items():
            module.training = mode
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = True
        right = (outputs.argmax(1) == y).double().mean()
        found.append([cross_entropy(outputs, y).item(), 100 * right.item()])
    return np.array(found)


def coordinates(one):
    if one.y is None:
        return torch.from_numpy(one.x)[:, None]
    return torch.tensor([[a, b] for b, a in product(one.y, one.x)])


def everything(model):
    """A copy of everything that a surface must not change."""
    copied = lambda t: None if t is None else t.clone()  # noqa: E731
    return {
        **{f"state {name}": copied(t) for name, t in model.state_dict().items()},
        **{f"grad {name}": copied(p.grad) for name, p in model.named_parameters()},
        **{f"requires_grad {name}": p.requires_grad for name, p in model.named_parameters()},
        **{f"address {name}": t.data_ptr() for name, t in model.state_dict().items()},
        **{f"stride {name}": t.stride() for name, t in model.state_dict().items()},
        **{f"training {name}": m.training for name, m in model.named_modules()},
        "tracks": model.stem[1].track_running_stats,
        "random": torch.get_rng_state(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


def snapshots(model, count, spread=0.3):
    """State dicts with values near the model's, BatchNorm's statistics too."""
    generator = torch.Generator().manual_seed(1)

    def near(t):
        return t + spread * t.abs().mean() * torch.rand(t.shape, generator=generator)

    found = []
    for _ in range(count):
        other = Residual()  # in which tied weights stay so
        state = model.state_dict().items()
        other.load_state_dict({n: near(t) if t.is_floating_point() else t for n, t in state})
        found.append(other.state_dict())
    return found


def flat(model, state):
    return torch.cat([state[name].flatten().double() for name, _ in model.named_parameters()])
