"""Two processes that train with the SAM family; run by sam/test_sam_distributed.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from problems import CLASSES, FEATURES, WRAPPERS, Wrapper, dataset, network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from saltflat.sam import ASAM, SAM


def smooth() -> nn.Module:
    """A network without BatchNorm, on which two halves equal the whole."""
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    return nn.Sequential(*layers).double()


def train(wrapper: Wrapper, model: nn.Module, rows: slice, steps: int = 5, **kwargs) -> nn.Module:
    """Some steps on part of the batch of 16."""
    optimizer = wrapper.make(
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model=model, **kwargs
    )
    for seed in range(steps):
        x, y = dataset(seed).tensors
        x = x[rows].to(next(model.parameters()).dtype)
        optimizer.step(wrapper.closure(optimizer, model, x, y[rows]))
    return model


def by_hand(steps: int, rho: float) -> nn.Module:
    """m-sharpness: each half climbs along its own gradient, the mean of the two is the step."""
    model = smooth()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for seed in range(steps):
        x, y = dataset(seed).tensors
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for half in (slice(0, 8), slice(8, 16)):
            twin = smooth()
            twin.load_state_dict(model.state_dict())

            def gradients(twin=twin, half=half, x=x, y=y):
                loss = cross_entropy(twin(x[half].double()), y[half])
                return torch.autograd.grad(loss, list(twin.parameters()))

            first = gradients()
            norm = torch.sqrt(sum((g**2).sum() for g in first))
            with torch.no_grad():
                for p, g in zip(twin.parameters(), first, strict=True):
                    p += rho * g / norm
            for total, g in zip(sums, gradients(), strict=True):
                total += g / 2
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total
        optimizer.step()
    return model


def same_on_both(model: nn.Module) -> bool:
    """Whether both ranks hold the same bits."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(copies, flat)
    return torch.equal(*copies)


def close(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)


def main(rank: int, store: str, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    half = slice(8 * rank, 8 * rank + 8)

    def say(*words: object) -> None:
        with Path(f"{store}.{rank}").open("a") as findings:
            print(*words, file=findings)

    (sharded if case == "sharded" else replicated)(half, say)
    dist.barrier()  # torch 2.6 may hang if one process leaves first
    dist.destroy_process_group()


def sharded(half: slice, say: Callable[..., None]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, wrapper in WRAPPERS.items():
        if not wrapper.per_row:
            parts, whole = train(wrapper, fully_shard(smooth(), mesh=mesh), half), smooth()
            for mine, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
                mine.data.copy_(theirs.full_tensor())
            alone = train(wrapper, smooth(), slice(0, 16))
            say(name, "sharded, equals one process:", close(whole, alone))


def replicated(half: slice, say: Callable[..., None]) -> None:
    for name, wrapper in WRAPPERS.items():
        model = train(wrapper, DistributedDataParallel(network()), half)
        say(name, "replicas equal:", same_on_both(model))
        if not wrapper.per_row:  # ESAM chooses rows on each rank
            model = train(wrapper, DistributedDataParallel(smooth()), half)
            alone = train(wrapper, smooth(), slice(0, 16))
            say(name, "equals one process:", close(model.module, alone))
    for method in (SAM, ASAM):
        wrapper = Wrapper(method, 2, 2)
        model = train(wrapper, DistributedDataParallel(smooth()), half, m_sharpness=True)
        alone = train(wrapper, smooth(), slice(0, 16))
        lazy = DistributedDataParallel(smooth())
        train(wrapper, lazy, half, m_sharpness=True, interval=2)
        say(method.__name__, "m-sharpness every other step:", same_on_both(lazy))
        say(method.__name__, "m-sharpness, replicas equal:", same_on_both(model))
        say(method.__name__, "m-sharpness differs:", not close(model.module, alone))
        if method is SAM:
            twin = by_hand(5, rho=0.05)
            say("m-sharpness equals by hand:", close(model.module, twin))


if __name__ == "__main__":
    mp.spawn(main, tuple(sys.argv[1:]), 2)
