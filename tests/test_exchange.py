import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saf_on_ranks import SCENARIOS

from saltflat import SAF, StickySampler
from saltflat.exchange import block


def run(folder, what, size, *args, **environment):
    """What each rank said."""
    script = Path(__file__).with_name("saf_on_ranks.py")
    command = [sys.executable, str(script), what, str(size), str(folder), *args]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    said = {rank: folder / f"said.{rank}" for rank in range(size)}
    lines = {rank: file.read_text() for rank, file in said.items() if file.exists()}
    assert result.returncode == 0, "\n".join([result.stderr, *lines.values()])
    return {rank: text.splitlines() for rank, text in lines.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_do_together_what_one_process_does(size, tmp_path):
    assert run(tmp_path, "scenarios", size) == {rank: list(SCENARIOS) for rank in range(size)}


def test_the_kernels_too(tmp_path):
    pytest.importorskip("triton")
    said = run(tmp_path, "scenarios", 2, "a_few_steps", TRITON_INTERPRET="1")
    assert said == {0: ["a_few_steps"], 1: ["a_few_steps"]}


@pytest.mark.parametrize("how", ["hangs", "is killed"])
def test_the_others_say_that_a_rank(how, tmp_path):
    assert run(tmp_path, "stops", 2, how) == {0: ["said so"]}


@pytest.mark.parametrize(("samples", "size"), [(24, 3), (10, 4), (7, 2), (5, 4), (1, 3)])
def test_blocks_are_those_of_chunk(samples, size):
    chunks = [chunk.tolist() for chunk in torch.arange(samples).chunk(size)]
    chunks += [[]] * (size - len(chunks))
    assert [list(block(samples, size, rank)) for rank in range(size)] == chunks


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("samples", "size"), [(24, 3), (23, 3), (10, 4)])
def test_a_sticky_sampler_keeps_every_sample_on_one_rank(samples, size, shuffle):
    samplers = [
        StickySampler(samples, num_replicas=size, rank=rank, shuffle=shuffle)
        for rank in range(size)
    ]
    for epoch in (0, 1, 5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in samplers]
        assert [set(order) for order in orders] == [
            set(block(samples, size, rank)) for rank in range(size)
        ]
        assert {len(order) for order in orders} == {len(samplers[0])} == {-(-samples // size)}
        assert orders == [list(sampler) for sampler in samplers]


def test_a_sticky_sampler_shuffles_anew_in_each_epoch_and_on_each_rank():
    samplers = [StickySampler(200, num_replicas=2, rank=rank) for rank in range(2)]
    orders = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
            orders.append([sample % 100 for sample in sampler])
    assert len({tuple(order) for order in orders}) == 6
    again = StickySampler(200, num_replicas=2, rank=0, seed=1)
    assert list(again) != list(StickySampler(200, num_replicas=2, rank=0))


def test_a_sticky_sampler_that_drops():
    samplers = [StickySampler(23, num_replicas=3, rank=rank, drop_last=True) for rank in range(3)]
    seen = [set() for _ in samplers]
    for epoch in range(20):
        for rank, sampler in enumerate(samplers):
            sampler.set_epoch(epoch)
            order = list(sampler)
            assert len(order) == len(set(order)) == len(sampler) == 7
            seen[rank] |= set(order)
    assert seen == [set(block(23, 3, rank)) for rank in range(3)]  # never the same left out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_replicas": 2, "rank": 2}, r"rank must be within 0..1 for num_replicas=2, got 2"),
        ({"num_replicas": 4, "rank": 0}, "5 samples in 4 blocks of 2 leave the last rank without"),
    ],
)
def test_a_sticky_sampler_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        StickySampler(5, **settings)


def test_one_process_has_all_samples_and_no_partner():
    assert sorted(StickySampler(5)) == [0, 1, 2, 3, 4]
    for exchange in ("any", "own"):
        saf = SAF(4, 3, lag=1, start_epoch=1, exchange=exchange)
        for epoch in range(2):
            saf.set_epoch(epoch)
            loss = saf(torch.eye(4, 3) * (epoch + 1), torch.arange(4))
        assert loss > 0
        assert "memory.block" not in saf.state_dict()
    with pytest.raises(ValueError, match='exchange must be "any" or "own", got \'some\''):
        SAF(4, 3, exchange="some")
