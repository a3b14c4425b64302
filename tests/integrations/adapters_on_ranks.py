"""Each framework on two processes; `test_adapter_contract.py` runs it with a folder.

Each trains four epochs straight through, and again in two halves with a checkpoint between them.
Every rank compares the two, the others' results, and one process that has the batches of both.
"""

from __future__ import annotations

import importlib
import math
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
from torch.nn.functional import cross_entropy


def gathered(value):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def compare(name, folder):
    for method in ("saf", "mesa", "near", "thin_auto_saf"):
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


def sharpness_is_the_mean_over_ranks():
    from lightning_fits import DataLoader, Module, dataset, fit, order

    from saltflat.integrations.lightning import SharpnessCallback
    from saltflat.sharpness import sam_sharpness

    class Own(SharpnessCallback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self.own = sam_sharpness(pl_module.net, cross_entropy, [batch], rho=self.rho)

    added, where = Own(), {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer = fit(Module(), [added], DataLoader(dataset(), 4, sampler=order()), epochs=1, **where)
    one, other = gathered(added.own)
    logged = float(trainer.callback_metrics["sharpness"])
    assert one != other and math.isclose(logged, (one + other) / 2, rel_tol=1e-4)


def a_state_of_half_the_rows_is_refused():
    from saltflat.integrations.timm import TrajectoryTask

    task = TrajectoryTask(smooth(), cross_entropy, TERMS["near"](None), verbose=False)
    task.set_epoch(0)
    task(torch.ones(1, 6), torch.tensor([2**24]))
    try:
        task.get_task_state()
    except RuntimeError as error:
        assert "sync()" in str(error)
    else:
        raise AssertionError("rows of one process were saved")
    task.term.sync()
    task.get_task_state()


MORE = {"lightning": sharpness_is_the_mean_over_ranks, "timm": a_state_of_half_the_rows_is_refused}


def rank_of(rank, name, port, folder):
    """One process, in the surroundings that torchrun makes."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({key: str(value) for key, value in {**ranks, **where}.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    compare(name, folder)
    MORE.get(name, lambda: None)()


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
