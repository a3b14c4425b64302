import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from saltflat.codecs import CODECS
from torch.nn.functional import cross_entropy

from saltflat import MESA, SAF, EMATeacher

SAMPLES, CLASSES, BATCH = 64, 10, 16
CUDA = torch.device("cuda")


def outputs(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(BATCH, CLASSES, generator=generator)).to(CUDA)


def epochs(last: int = 5):
    """Batches with duplicates inside and between them."""
    for epoch in range(last):
        generator = torch.Generator().manual_seed(epoch)
        indices = torch.randint(SAMPLES, (6, BATCH), generator=generator)
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
@pytest.mark.parametrize("place", ["host", "file"])
def test_a_store_in_host_memory_gives_the_same_bits(storage, place, tmp_path):
    where = {"device": "cpu"} if place == "host" else {"path": tmp_path / "table"}
    near, far = make(storage), make(storage, **where)
    for expected, got in zip(trace(near), trace(far), strict=True):
        assert torch.equal(got, expected)
    state = far.state_dict()
    assert state["memory.table"].device.type == "cpu"
    for name, tensor in near.state_dict().items():
        assert torch.equal(state[name].cpu(), tensor.cpu()), name


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
        saf.prefetch(index, CUDA)
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


@pytest.mark.parametrize("rescale", [False, True])
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
    with pytest.raises(ValueError, match=r"1 indices since the last set_epoch were outside 0..63"):
        saf.set_epoch(1)


def test_a_captured_step_follows_the_epochs():
    captured, eager = make(), make()
    logits = torch.zeros(BATCH, CLASSES, device=CUDA, requires_grad=True)
    labels = torch.arange(BATCH, device=CUDA) % CLASSES
    index = torch.zeros(BATCH, dtype=torch.int64, device=CUDA)

    def step() -> torch.Tensor:
        logits.grad = None
        loss = cross_entropy(logits, labels) + captured(logits, index)
        loss.backward()
        return loss.detach()

    graph = None
    for epoch, batches in epochs(8):
        captured.set_epoch(epoch), eager.set_epoch(epoch)
        for batch_index, seed in batches:
            twin = outputs(seed).requires_grad_()
            expected = cross_entropy(twin, labels) + eager(twin, batch_index)
            expected.backward()
            with torch.no_grad():
                logits.copy_(twin)
            index.copy_(batch_index)
            if epoch < captured.start_epoch:
                loss = step()
            else:
                if graph is None:
                    saved = {k: v.clone() for k, v in captured.state_dict().items()}
                    side = torch.cuda.Stream()
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        step()
                    torch.cuda.current_stream().wait_stream(side)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        loss = step()
                    captured.load_state_dict(saved)
                graph.replay()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(logits.grad, twin.grad)
    assert graph is not None
    for name, tensor in eager.state_dict().items():
        assert torch.equal(captured.state_dict()[name], tensor), name


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
    clock = 32  # four int64
    assert requested() - before == SAF.estimate_bytes(100_000, 100, storage=storage) + clock
    assert saf.memory.nbytes == SAF.estimate_bytes(100_000, 100, storage=storage)


@pytest.mark.parametrize("place", ["host", "file"])
def test_prefetched_rows_are_the_same_bits(place, tmp_path):
    def run(ahead):
        where = {"device": "cpu"} if place == "host" else {"path": tmp_path / f"table{ahead}"}
        saf, seen = make(**where), []
        for epoch, batches in epochs():
            saf.set_epoch(epoch)
            for number, (index, seed) in enumerate(batches):
                if ahead == 1:
                    saf.prefetch(index, CUDA)
                elif ahead == 2 and number + 1 < len(batches) and number % 2:
                    saf.prefetch(batches[number + 1][0], CUDA)  # before this batch is written
                loss = saf(outputs(seed).requires_grad_(), index)
                seen.append(loss.detach())
        return seen

    plain = run(0)
    for ahead in (1, 2):
        for got, expected in zip(run(ahead), plain, strict=True):
            assert torch.equal(got, expected)
