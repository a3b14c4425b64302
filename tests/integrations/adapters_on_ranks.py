"""Each framework on two processes; `test_adapter_contract.py` runs it with a folder.

Each trains four epochs straight through, and again in two halves with a checkpoint between them.
Every rank compares the two, the others' results, and one process that has the batches of both.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from adapters import FRAMEWORKS, INDEXED, TERMS, plain, smooth
from problems import same


def gathered(value):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def compare(name, folder):
    for method in ("saf", "mesa", "near"):
        train = partial(FRAMEWORKS[name], TERMS[method], indexed=method in INDEXED)
        straight = train(folder / method / "straight")
        train(folder / method / "halves", until=2)
        dist.barrier()
        resumed = train(folder / method / "halves", resume=True)
        assert same(dict(resumed.net.state_dict()), dict(straight.net.state_dict()))
        for term in (straight.term, resumed.term):
            term.sync()
            for other in gathered(dict(term.state_dict())):
                assert same(other, dict(straight.term.state_dict()))
        for other in gathered(dict(straight.net.state_dict())):
            assert same(other, dict(straight.net.state_dict()))
        alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
        rows = [torch.cat(both) for both in zip(*gathered(straight.rows), strict=True)]
        make = partial(TERMS[method], process_group=alone)
        expected, _, _ = plain(make, rows, model=smooth)
        for key, tensor in straight.net.state_dict().items():
            torch.testing.assert_close(tensor, expected.state_dict()[key], msg=f"{method} {key}")


def rank_of(rank, name, port, folder):
    """One process, in the surroundings that torchrun makes."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({key: str(value) for key, value in {**ranks, **where}.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    compare(name, folder)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in FRAMEWORKS:
        importlib.import_module(f"saltflat.integrations.{name}")  # once, before the processes fork
    for name in FRAMEWORKS:
        mp.start_processes(
            rank_of, (name, free_port(), folder / name), nprocs=2, start_method="fork"
        )
        print(name)
