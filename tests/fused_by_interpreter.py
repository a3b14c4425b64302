"""The GPU kernels on the CPU, by Triton's interpreter, beside what PyTorch computes.

Run by test_fused.py in a process of its own, with TRITON_INTERPRET=1 in its environment.
"""

import warnings
from functools import partial

import torch

from saltflat import MESA, SAF, _average, _fused, _term, mesa, saf
from saltflat._match import MATCHES
from saltflat._sources import Staged
from saltflat.codecs import CODECS

SAMPLES, BATCH = 20, 9
warnings.filterwarnings("ignore", message="invalid value encountered", category=RuntimeWarning)


def trace(storage: str, classes: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Losses, gradients and tables of some epochs, with duplicates and rows that are not finite."""
    generator = torch.Generator().manual_seed(classes)
    term = SAF(SAMPLES, classes, lag=2, start_epoch=2, storage=storage)
    seen = []
    for epoch in range(5):
        term.set_epoch(epoch)
        for _ in range(3):
            index = torch.randint(SAMPLES, (BATCH,), generator=generator)
            logits = (4 * torch.randn(BATCH, classes, generator=generator)).to(dtype)
            if epoch == 1:
                logits[2, 1], logits[3, 0] = float("nan"), float("inf")
            logits.requires_grad_()
            loss = term(logits, index)
            seen.append(loss.detach())
            if epoch >= term.start_epoch:
                loss.backward()
                seen.append(logits.grad)
        seen += [tensor.clone() for tensor in term.memory._rings().values()]
    assert term.nonfinite_rows == 6
    return seen


def both(run):
    """What a function gives with the kernels, and with PyTorch alone."""
    fused = run()
    for module in (saf, mesa):
        module.can_fuse = lambda logits: False
    plain = run()
    for module in (saf, mesa):
        module.can_fuse = _term.can_fuse
    return zip(fused, plain, strict=True)


def the_memory_and_the_loss_are_pytorchs(
    storage: str, classes: int, dtype: torch.dtype = torch.float32
) -> None:
    near = {"rtol": 2e-2, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for got, expected in both(lambda: trace(storage, classes, dtype)):
        if got.is_floating_point() and got.dim() < 3:
            torch.testing.assert_close(got, expected, **near)
        else:
            assert torch.equal(got, expected), "what is stored is the same to the bit"


def outputs_that_agree_have_no_gradient() -> None:
    for storage in ("float32", "float16"):
        term = SAF(BATCH, 5, lag=1, start_epoch=1, storage=storage)
        logits = (3 * torch.randn(BATCH, 5)).half().float().requires_grad_()
        for epoch in range(2):
            term.set_epoch(epoch)
            loss = term(logits, torch.arange(BATCH))
        loss.backward()
        assert loss == 0 and (logits.grad == 0).all()


def second_derivatives_are_pytorchs() -> None:
    def run():
        torch.manual_seed(1)
        term = SAF(BATCH, 5, lag=1, start_epoch=1, storage="float32")
        for epoch in range(2):
            term.set_epoch(epoch)
            logits = torch.randn(BATCH, 5).requires_grad_()
            loss = term(logits, torch.arange(BATCH))
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        (second,) = torch.autograd.grad((first * torch.arange(45.0).view(9, 5)).sum(), logits)
        return [first.detach(), second]

    for got, expected in both(run):
        torch.testing.assert_close(got, expected)


def rows_from_elsewhere_are_compared_and_encoded() -> None:
    for storage, codec in CODECS.items():
        past, now = torch.randn(BATCH, 7), torch.randn(BATCH, 7)
        stored = codec.encode(past)
        valid = torch.arange(BATCH) % 3 > 0
        source = Staged(stored, valid, torch.empty_like(stored), torch.arange(BATCH), storage)
        count = torch.zeros((), dtype=torch.int64)
        loss, finite = _fused.weighted_loss(
            now, source, count, weight=0.5, temperature=2.0, tau_squared=False
        )
        reference = codec.decode(stored)
        expected = 0.5 * _term.trajectory_loss(
            now, reference, temperature=2.0, tau_squared=False, valid=valid
        )
        torch.testing.assert_close(loss, expected)
        assert torch.equal(source.outgoing, codec.encode(now)) and finite.all() and count == 0


def an_index_out_of_range_is_masked_and_counted() -> None:
    term = SAF(SAMPLES, 3, lag=1, start_epoch=1)
    term.set_epoch(0)
    logits = torch.randn(4, 3)
    ring = term.memory.source(torch.arange(4), logits)._replace(index=torch.tensor([-1, 2, 20, 2]))
    _fused.weighted_loss(
        logits, ring, term._nonfinite, weight=1.0, temperature=1.0, tau_squared=True, started=False
    )
    stamps, table = (term.memory._rings()[name][0] for name in ("stamps", "table"))
    assert (stamps >= 0).nonzero().flatten().tolist() == [2]
    assert torch.equal(table[2], logits[3].half())
    assert term.memory._clock[3] == 2


def mesas_loss_is_pytorchs() -> None:
    def run(match, dtype, teacher):
        torch.manual_seed(2)
        model = torch.nn.Linear(4, 6, dtype=dtype)
        term = MESA(model, start_epoch=0, interval=2, match=match)
        term.set_epoch(0)
        for tensor in term.teacher.parameters():
            tensor *= teacher
        model.weight.data += 0.5
        x = torch.randn(8, 4, dtype=dtype)
        x[1, 0] = float("nan")
        loss = term(model(x), x)
        loss.backward()
        assert term.nonfinite_rows == 1
        return [loss.detach(), torch.nan_to_num(model.weight.grad)]

    for match in MATCHES:
        for dtype in (torch.float32, torch.bfloat16):
            # Larger outputs, the opposite ones, and the same for every class.
            for teacher in (3.0, -1.0, 0.0):
                for got, expected in both(partial(run, match, dtype, teacher)):
                    torch.testing.assert_close(got, expected)


def a_teacher_that_is_the_model_pulls_by_nothing() -> None:
    for match in MATCHES:
        model = torch.nn.Linear(4, 6)
        term = MESA(model, start_epoch=0, match=match)
        term.set_epoch(0)
        x = torch.randn(8, 4)
        loss = term(model(x), x)
        loss.backward()
        assert loss == 0 and not model.weight.grad.any()


def averages_are_lerps() -> None:
    _average._plain = lambda v, x: True
    sizes, variances = ((5000,), (3, 7), (1,), (4096,), (70,)), [False, False, False, True, True]
    pairs = [(torch.randn(size), torch.randn(size)) for size in sizes]
    pairs = [(v**2, x**2) if var else (v, x) for (v, x), var in zip(pairs, variances, strict=True)]
    old, new = (list(tensors) for tensors in zip(*pairs, strict=True))
    for weight in (0.0, 0.3, 0.9, 1.0):
        averages = [tensor.clone() for tensor in old]
        averaging = _average.Averaging(averages, new, variances, lasting=True)
        averaging(averages, new, torch.tensor(weight, dtype=torch.float64), None)
        for got, before, live, var in zip(averages, old, new, variances, strict=True):
            if var:
                torch.testing.assert_close(got, before.sqrt().lerp(live.sqrt(), weight) ** 2)
            else:
                torch.testing.assert_close(got, torch.lerp(before, live, weight))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for storage in CODECS:
        the_memory_and_the_loss_are_pytorchs(storage, classes=3)
    the_memory_and_the_loss_are_pytorchs("uint8", classes=40)
    the_memory_and_the_loss_are_pytorchs("float16", classes=40, dtype=torch.bfloat16)
    outputs_that_agree_have_no_gradient()
    second_derivatives_are_pytorchs()
    rows_from_elsewhere_are_compared_and_encoded()
    an_index_out_of_range_is_masked_and_counted()
    mesas_loss_is_pytorchs()
    a_teacher_that_is_the_model_pulls_by_nothing()
    averages_are_lerps()
    print("all is as it should be")
