import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import cross_entropy

from saltflat import MESA, SAF, EMATeacher
from saltflat.core.cuda_graph import GraphedStep
from saltflat.memory import CODECS

SAMPLES, CLASSES, BATCH = 64, 10, 16
CUDA = torch.device("cuda")


def outputs(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(BATCH, CLASSES, generator=generator)).to(CUDA)


def epochs(last: int = 5):
    """Every sample once, then batches with duplicates inside and between them."""
    for epoch in range(last):
        generator = torch.Generator().manual_seed(epoch)
        once = torch.randperm(SAMPLES, generator=generator).view(-1, BATCH)
        indices = torch.cat([once, torch.randint(SAMPLES, (2, BATCH), generator=generator)])
        yield epoch, [(index, 100 * epoch + i) for i, index in enumerate(indices)]


def trace(saf: SAF, index_device: str = "cpu") -> list[torch.Tensor]:
    """Losses and gradients of some epochs."""
    seen = []
    for epoch, batches in epochs():
        saf.set_epoch(epoch)
        for index, seed in batches:
            logits = outputs(seed).requires_grad_()
            loss = saf(logits, index.to(index_device))
            if epoch >= saf.start_epoch:
                loss.backward()
                seen += [loss.detach(), logits.grad]
    return seen


@contextmanager
def no_waiting():
    """Whatever waits for the GPU in here raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(storage: str = "float16", **kwargs) -> SAF:
    return SAF(SAMPLES, CLASSES, lag=2, start_epoch=2, storage=storage, **kwargs)


@pytest.mark.parametrize("storage", CODECS)
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_a_memory_on_the_host_gives_the_same_bits(storage, index_device):
    near, far = make(storage), make(storage, device="cpu")
    for expected, got in zip(trace(near), trace(far, index_device), strict=True):
        assert torch.equal(got, expected)
    state = far.state_dict()
    assert state["memory.table"].device.type == "cpu"
    for name, tensor in near.state_dict().items():
        assert torch.equal(state[name].cpu(), tensor.cpu()), name


def test_a_memory_on_the_host_cannot_be_captured():
    saf = make(device="cpu")
    trace(saf)
    step = GraphedStep(lambda z, i: saf(z, i), [saf], warmup=1)
    step(outputs(0), torch.arange(BATCH, device=CUDA))
    with pytest.raises(RuntimeError, match="device='cpu'"):
        step(outputs(0), torch.arange(BATCH, device=CUDA))


@pytest.mark.parametrize("storage", CODECS)
def test_a_table_loaded_from_host_memory_follows_the_logits(storage):
    saved = make(storage)
    trace(saved)
    state = {name: tensor.cpu() for name, tensor in saved.state_dict().items()}
    loaded = make(storage)
    loaded.load_state_dict(state)
    index, logits = torch.arange(BATCH), outputs(7)
    for saf in (saved, loaded):
        saf.set_epoch(5)
    assert torch.equal(loaded(logits, index), saved(logits, index))
    assert loaded.state_dict()["memory.table"].device.type == "cuda"


@pytest.mark.parametrize("storage", CODECS)
def test_an_index_on_the_gpu_gives_the_same_bits(storage):
    for expected, got in zip(trace(make(storage)), trace(make(storage), "cuda"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_a_step_never_waits_for_the_gpu(index_device):
    saf = make()
    trace(saf)
    saf.set_epoch(6)
    logits, index = outputs(0).requires_grad_(), torch.arange(BATCH, device=index_device)
    with no_waiting():
        saf(logits, index).backward()
    assert logits.grad is not None


def test_the_teacher_never_waits_for_the_gpu():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(CUDA)
    mesa = MESA(model, start_epoch=0)
    mesa.set_epoch(0)
    x = torch.randn(8, 4, device=CUDA)
    mesa(model(x), x)
    mesa.update(model)
    with no_waiting():
        mesa(model(x), x).backward()
        mesa.update(model)
    assert mesa.teacher.updates == 2


@pytest.mark.parametrize("average_std", [True, False])
def test_the_average_is_that_on_the_cpu(average_std):
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(90, 70), torch.nn.BatchNorm1d(70))]
    models.append(copy.deepcopy(models[0]).to(CUDA))
    teachers = [EMATeacher(model, decay=0.9, average_std=average_std) for model in models]
    for _ in range(20):
        changes = {
            name: torch.rand_like(t) for name, t in models[0].state_dict().items() if t.dim()
        }
        for model, teacher in zip(models, teachers, strict=True):
            model.load_state_dict(changes, strict=False)
            teacher.update(model)
    ours, theirs = (teacher.module.cpu().state_dict() for teacher in teachers)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mesas_loss_is_that_on_the_cpu(rescale, dtype):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, CLASSES)
    x = torch.randn(BATCH, 4)
    seen = []
    for device in (torch.device("cpu"), CUDA):
        copied = copy.deepcopy(model).to(device)
        mesa = MESA(copied, start_epoch=0, rescale=rescale)
        mesa.set_epoch(0)
        with torch.no_grad():
            copied.weight[0] += 1
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = mesa(copied(x.to(device)), x.to(device))
        loss.backward()
        seen.append((loss.detach().cpu(), copied.weight.grad.cpu()))
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for got, expected in zip(*seen, strict=True):
        torch.testing.assert_close(got, expected, **near)


def test_an_index_out_of_range_on_the_gpu_is_masked_and_reported():
    saf = make()
    saf.set_epoch(0)
    saf(outputs(0), torch.arange(BATCH, device=CUDA) + SAMPLES - BATCH + 1)
    assert (saf.state_dict()["memory.stamps"] >= 0).sum() == BATCH - 1
    with pytest.raises(ValueError, match=r"index.*0..63 in 1 rows"):
        saf.set_epoch(1)


@pytest.mark.parametrize("storage", CODECS)
def test_a_captured_saf_equals_the_eager_one(storage):
    captured, eager = make(storage), make(storage)
    labels = torch.arange(BATCH, device=CUDA) % CLASSES

    def step(logits, index, saf=captured):
        logits = logits.detach().requires_grad_()
        loss = cross_entropy(logits, labels) + saf(logits, index)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    graphed = GraphedStep(step, [captured], warmup=2)
    for epoch, batches in epochs(8):
        captured.set_epoch(epoch), eager.set_epoch(epoch)
        for index, seed in batches:
            got = graphed(outputs(seed), index.to(CUDA))
            expected = step(outputs(seed), index.to(CUDA), eager)
            torch.testing.assert_close(got, expected)
    assert len(graphed._graphs) == 2
    for name, tensor in eager.state_dict().items():
        assert torch.equal(captured.state_dict()[name], tensor), name


@pytest.mark.parametrize("warmup", [False, True])
def test_a_captured_mesa_equals_the_eager_one(warmup):
    def run(kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).to(CUDA)
        mesa = MESA(model, start_epoch=1, decay=0.9, warmup=warmup, freeze_epoch=3)
        rate = torch.tensor(0.1, device=CUDA)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            logits = model(x)
            loss = logits.square().mean() + mesa(logits, x)
            loss.backward()
            optimizer.step()
            mesa.update(model)
            return loss.detach()

        graphed = kind(step, [mesa, optimizer]) if kind else step
        for epoch in range(5):
            mesa.set_epoch(epoch)
            for batch in range(6):
                generator = torch.Generator().manual_seed(10 * epoch + batch)
                graphed(torch.randn(16, 4, generator=generator).to(CUDA))
        return {**model.state_dict(), **mesa.state_dict()}

    torch.testing.assert_close(run(GraphedStep), run(None))


@pytest.mark.parametrize("storage", CODECS)
def test_inductor_gives_the_same_loss(storage):
    torch._dynamo.reset()
    plain, compiled = make(storage), make(storage)
    compiled_call = torch.compile(compiled, fullgraph=True)
    for epoch, batches in epochs():
        plain.set_epoch(epoch), compiled.set_epoch(epoch)
        for index, seed in batches:
            logits, twin = outputs(seed).requires_grad_(), outputs(seed).requires_grad_()
            loss, expected = compiled_call(logits, index.to(CUDA)), plain(twin, index)
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
            if epoch >= plain.start_epoch:
                (loss + expected).backward()
                torch.testing.assert_close(logits.grad, twin.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("storage", CODECS)
def test_takes_the_bytes_it_says_on_the_gpu(storage):
    def requested() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    torch.zeros(1, device="cuda")
    before = requested()
    saf = SAF(100_000, 100, storage=storage, device="cuda")
    clock = 40  # five int64
    assert requested() - before == SAF.estimate_bytes(100_000, 100, storage=storage) + clock
    assert saf.memory.nbytes == SAF.estimate_bytes(100_000, 100, storage=storage)
