"""Processes that train with SAF and others; run by test_merge.py.

Every scenario is run by all ranks at the same time. Most compare a term on all ranks with a twin
that each rank has for itself, in a group of one, and that is given the batches of all.
"""

import copy
import json
import os
import pickle
import re
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from problems import CLASSES, FEATURES, SAMPLES, dataset, network, same
from terms.thin_auto_saf import ThinAutoSAF
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from saltflat.memory import CODECS, merge
from saltflat.terms import MESA, SAF, Batch

N = 23
"""Samples: the sampler pads them, and the last batch is short."""


class Ranks:
    """What a scenario is given."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.alone = dist.new_group([rank], use_local_synchronization=True)

    def gathered(self, thing, group=None):
        things = [None] * dist.get_world_size(group)
        dist.all_gather_object(things, thing, group)
        return things

    def require_same(self, term):
        """Every rank's state is the same to the bit."""
        state = {name: tensor.clone() for name, tensor in term.state_dict().items()}
        assert all(same(other, state) for other in self.gathered(state))
        return state


def outputs(rows, *seed):
    seed = sum(number * 101**place for place, number in enumerate(seed))
    return 4 * torch.randn(rows, CLASSES, generator=torch.Generator().manual_seed(seed))


def sampled(size, epoch, num_samples=N, batch_size=5):
    """For each step of an epoch, the batches of all ranks; epochs 1 and 4 end early."""
    orders = []
    for rank in range(size):
        sampler = DistributedSampler(range(num_samples), size, rank, seed=7)
        sampler.set_epoch(epoch)
        orders.append(torch.tensor(list(sampler)).split(batch_size))
    steps = list(zip(*orders, strict=True))
    return steps[:-1] if epoch in (1, 4) else steps


def drawn(size, epoch):
    """Batches with repetitions: in a batch, in a later step, and on another rank."""
    generator = torch.Generator().manual_seed(epoch)
    return list(torch.randint(N, (4, size, 5), generator=generator))


def spy(term):
    """Note what a term's memory gives, in `term.seen`."""
    read = term.memory.read
    term.seen = None

    def spied(*args):
        term.seen = read(*args)
        return term.seen

    term.memory.read = spied


def follow(ranks, term, twin, epochs, rank=None, size=None, sync=(), draw=sampled):
    """Feed a term a batch on each rank, and its twin all of them; compare what they read."""
    rank, size = ranks.rank if rank is None else rank, size or ranks.size
    spy(term), spy(twin)
    compared = 0
    for epoch in epochs:
        term.set_epoch(epoch), twin.set_epoch(epoch)
        for step, batches in enumerate(draw(size, epoch)):
            rows = [len(batch) for batch in batches]
            logits = [outputs(n, epoch, step, r) for r, n in enumerate(rows)]
            if (epoch, step) in {(0, 0), (2, 1)}:
                logits[size - 1][0, 1] = float("nan")
            own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            everyones, index = torch.cat(logits), torch.cat(list(batches))
            labels = index % CLASSES
            losses = [
                term(logits[rank], Batch(batches[rank], labels=labels[own])),
                twin(everyones, Batch(index, labels=labels)),
            ]
            if (epoch, step) in sync:
                term.sync()
            if epoch > 2 and not term.replaces_loss:
                (reference, valid), (references, all_valid) = term.seen, twin.seen
                assert torch.equal(valid, all_valid[own])
                assert torch.equal(reference[valid], references[own][valid])
                compared += int(valid.sum())
                parts = torch.tensor(ranks.gathered(losses[0].item() * rows[rank], term._group.it))
                torch.testing.assert_close(parts.sum() / sum(rows), losses[1])
    return compared


def require_equal(term, twin):
    """The whole of a term's state is its twin's; rows that were never written do not count."""
    state, expected = dict(term.state_dict()), dict(twin.state_dict())
    written = expected["memory.stamps"] >= 0
    for name, tensor in expected.items():
        if name == "memory.table":
            assert torch.equal(state[name][written], tensor[written]), name
        else:
            assert torch.equal(state[name], tensor), name


def pair(ranks, kind=SAF, group=None, **kwargs):
    settings = {"lag": 2, "start_epoch": 2} if kind is SAF else {"judge_epoch": 3}
    make = partial(kind, N, CLASSES, **{**settings, **kwargs})
    return make(process_group=group), make(process_group=ranks.alone)


def every_storage_reads_what_one_process_reads(ranks):
    for storage in CODECS:
        term, twin = pair(ranks, storage=storage)
        assert follow(ranks, term, twin, range(7)) > 0
        term.sync()
        require_equal(term, twin)
        ranks.require_same(term)
        assert term.nonfinite_rows == twin.nonfinite_rows == 2


def of_a_sample_on_several_ranks_the_first_call_counts(ranks):
    with warnings.catch_warnings(action="ignore"):  # that many rows share an index
        for kind in (SAF, ThinAutoSAF):
            term, twin = pair(ranks, kind)
            follow(ranks, term, twin, range(6), draw=drawn)
            term.sync()
            require_equal(term, twin)
            synced, twin = pair(ranks, kind)
            some = {(epoch, step) for epoch in range(6) for step in (0, 2)}
            follow(ranks, synced, twin, range(6), draw=drawn, sync=some)
            synced.sync()
            require_equal(synced, twin)


def averages_take_visits_and_labels_along(ranks):
    term, twin = pair(ranks, ThinAutoSAF)
    follow(ranks, term, twin, range(6))
    term.sync()
    require_equal(term, twin)
    state = ranks.require_same(term)
    assert state["noise_rate"] >= 0 and state["memory.visits"].max() == 6
    assert (state["memory.labels"][0] == torch.arange(N) % CLASSES).all()


def a_merge_in_chunks_gives_the_same(ranks):
    whole, merge.CHUNK = merge.CHUNK, 48
    try:
        for kind in (SAF, ThinAutoSAF):
            term, twin = pair(ranks, kind)
            follow(ranks, term, twin, range(5))
            term.sync()
            require_equal(term, twin)
    finally:
        merge.CHUNK = whole


def every_state_is_whole_after_set_epoch_and_sync(ranks):
    term, _ = pair(ranks)
    for epoch in range(4):
        term.set_epoch(epoch)
        ranks.require_same(term)
        for step, batches in enumerate(sampled(ranks.size, epoch)):
            index = batches[ranks.rank]
            term(outputs(len(index), epoch, step, ranks.rank), index)
            expect(RuntimeError, "sync", term.state_dict)
            if step == 1:
                term.sync()
                state = ranks.require_same(term)
                seen = torch.cat([i for both in sampled(ranks.size, epoch)[:2] for i in both])
                slot = state["memory.stamps"][epoch % 3]
                assert (slot == epoch).sum() == len(seen.unique())


def a_sync_changes_nothing(ranks):
    plain, twin = pair(ranks)
    follow(ranks, plain, twin, range(5))
    synced, twin = pair(ranks)
    often = {(epoch, step) for epoch in range(5) for step in range(5)} - {(1, 0), (3, 1)}
    follow(ranks, synced, twin, range(5), sync=often)
    plain.sync(), synced.sync()
    assert same(dict(plain.state_dict()), dict(synced.state_dict()))


def counters_are_right_after_a_sync_and_a_merge(ranks):
    term, _ = pair(ranks)
    term.set_epoch(0)
    rows = outputs(4)
    rows[: ranks.rank + 1, 0] = float("inf")
    total = sum(range(1, ranks.size + 1))
    for times in (1, 2):
        term(rows, torch.arange(4))
        assert term.nonfinite_rows == (times - 1) * total + ranks.rank + 1
        term.sync()
        assert term.nonfinite_rows == times * total
    term.set_epoch(1)
    assert term.nonfinite_rows == 2 * total
    term.sync(), term.set_epoch(1), term.set_epoch(2)
    assert term.nonfinite_rows == 2 * total


def steps_send_nothing_and_the_same_epoch_merges_nothing(ranks):
    term, _ = pair(ranks)
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *args: calls.append(1) or all_reduce(*args)
    try:
        term.set_epoch(0)
        term(outputs(4), torch.arange(4))
        assert len(calls) == 1, "the agreement"
        term.set_epoch(0)
        assert len(calls) == 2
        term.set_epoch(1)
        assert len(calls) == 6, "agreement, counters, owners and table"
        term.set_epoch(1)
        assert len(calls) == 7
    finally:
        dist.all_reduce = all_reduce


def the_same_epoch_again_keeps_the_order_of_calls(ranks):
    """Rank 0 writes sample 7 in its third call; rank 1, in its fourth, comes too late."""
    term, twin = pair(ranks)
    for both in (term, twin):
        both.set_epoch(0)
    for call in range(4):
        sample = 7 if (ranks.rank, call) in ((0, 2), (1, 3)) else 8 + call
        term(outputs(1, ranks.rank, call), torch.tensor([sample]))
        if call == 2:
            term.set_epoch(0)
    term.sync()
    row = term.state_dict()["memory.table"][0, 7].float()
    torch.testing.assert_close(row, outputs(1, 0, 2)[0], rtol=1e-2, atol=1e-2)


def a_sync_before_the_first_epoch(ranks):
    term, _ = pair(ranks)
    term.sync()
    ranks.require_same(term)


def a_state_loads_on_any_number_of_ranks(ranks):
    """Saved by two, in the middle of an epoch; continued by one and by all."""
    both = dist.new_group([0, 1])
    saved = None
    if ranks.rank < 2:
        term, twin = pair(ranks, group=both)
        follow(ranks, term, twin, range(4), size=2)
        term.sync()
        saved = dict(term.state_dict())
    saved = ranks.gathered(saved)[0]
    term, twin = pair(ranks)
    term.load_state_dict(saved), twin.load_state_dict(saved)
    assert term.epoch == 3
    follow(ranks, term, twin, range(3, 7))
    term.sync()
    require_equal(term, twin)


def ranks_that_disagree(ranks):
    last = ranks.rank == ranks.size - 1
    for name, usual, odd in (
        ("weight", 0.3, 0.30001),
        ("lag", 2, 3),
        ("storage", *list(CODECS)[:2]),
    ):
        term, _ = pair(ranks, start_epoch=5, **{name: odd if last else usual})
        expect(RuntimeError, f"settings.*{name}=", term.set_epoch, 0)
        assert term.epoch is None
    term, _ = pair(ranks)
    expect(RuntimeError, f"to epoch {int(last)}", term.set_epoch, int(last))


def a_rank_that_alone_loads_a_state_is_noticed(ranks):
    term, twin = pair(ranks)
    twin.set_epoch(3)
    if ranks.rank == 0:
        term.load_state_dict(twin.state_dict())
    expect(RuntimeError, "load the same state", term.set_epoch, 3)


def a_subgroup(ranks):
    """The first and the last rank train together, and another is left alone."""
    members = [0, ranks.size - 1]
    group = dist.new_group(members)
    if ranks.rank in members:
        term, twin = pair(ranks, group=group)
        assert follow(ranks, term, twin, range(5), members.index(ranks.rank), 2) > 0
    else:
        term, _ = pair(ranks, group=group)
        expect((ValueError, RuntimeError), "process_group|group", term.set_epoch, 0)


def colliding_indices_are_noticed(ranks):
    """Each rank numbers its own samples from 0."""
    term, _ = pair(ranks)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for epoch in range(3):
            term.set_epoch(epoch)
            term(outputs(7, epoch, ranks.rank), torch.arange(7))
    assert len(said) == 1 and f"{7 * ranks.size} rows but only 7" in str(said[0].message)


def training_equals_one_process(ranks):
    def train(model, batches, **kwargs):
        saf = SAF(SAMPLES, CLASSES, lag=1, start_epoch=1, weight=1.0, **kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for epoch in range(6):
            saf.set_epoch(epoch)
            for index in batches(epoch):
                logits = model(x[index])
                optimizer.zero_grad()
                (cross_entropy(logits, y[index]) + saf(logits, index)).backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def steps(epoch):
        return sampled(ranks.size, epoch, SAMPLES, SAMPLES // (2 * ranks.size))

    def smooth():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    x, y = dataset().tensors
    ours = train(DistributedDataParallel(smooth()), lambda e: [b[ranks.rank] for b in steps(e)])
    alone = partial(train, smooth(), lambda e: [torch.cat(b) for b in steps(e)])
    torch.testing.assert_close(ours, alone(process_group=ranks.alone), rtol=1e-3, atol=1e-4)


def teachers_stay_the_same(ranks):
    """With other data and another start on each rank, buffers included."""
    model = network(seed=ranks.rank)
    mesa = MESA(model, start_epoch=1, decay=0.9, rescale=True)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(3):
        mesa.set_epoch(epoch)
        for step in range(3):
            x = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(7 + ranks.rank))
            logits = ddp(x + step)
            optimizer.zero_grad()
            (cross_entropy(logits, torch.arange(5) % CLASSES) + mesa(logits, x + step)).backward()
            optimizer.step()
            mesa.update(ddp)
            state = dict(mesa.teacher.state_dict())
            assert all(same(other, state) for other in ranks.gathered(state))
    mesa.sync()
    assert ranks.require_same(mesa)["counts"][0] == 15 * ranks.size
    assert not all(
        same(other, model[1].running_mean) for other in ranks.gathered(model[1].running_mean)
    )


def copies_share_their_group(ranks):
    group = dist.new_group(range(ranks.size))
    for one in (SAF(N, CLASSES, process_group=group), MESA(network(), process_group=group)):
        assert same(dict(copy.deepcopy(one).state_dict()), dict(one.state_dict()))
        expect(TypeError, "process group.*state_dict", pickle.dumps, one)


def expect(kind, message, function, *args):
    """As pytest.raises, which is not in these processes."""
    try:
        function(*args)
    except kind as error:
        assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError(f"no error: {message}")


SCENARIOS = [
    every_storage_reads_what_one_process_reads,
    of_a_sample_on_several_ranks_the_first_call_counts,
    averages_take_visits_and_labels_along,
    a_merge_in_chunks_gives_the_same,
    every_state_is_whole_after_set_epoch_and_sync,
    a_sync_changes_nothing,
    counters_are_right_after_a_sync_and_a_merge,
    steps_send_nothing_and_the_same_epoch_merges_nothing,
    the_same_epoch_again_keeps_the_order_of_calls,
    a_sync_before_the_first_epoch,
    a_state_loads_on_any_number_of_ranks,
    ranks_that_disagree,
    a_rank_that_alone_loads_a_state_is_noticed,
    a_subgroup,
    colliding_indices_are_noticed,
    training_equals_one_process,
    teachers_stay_the_same,
    copies_share_their_group,
]


STOPS = ["hangs", "is killed"]


def scenarios(ranks):
    """What went wrong in each scenario, on any rank; after the first fault nothing is certain."""
    results = {}
    for scenario in SCENARIOS:
        try:
            scenario(ranks)
            result = ""
        except BaseException:
            result = traceback.format_exc()
        results[scenario.__name__] = "\n".join(filter(None, ranks.gathered(result)))
    return results


def a_rank_that_does_not_come(ranks, how):
    """The last rank leaves in the middle of an epoch; the others say what they waited for."""
    term, _ = pair(ranks)
    term.set_epoch(0)
    term(outputs(4), torch.arange(4))
    if ranks.rank == ranks.size - 1:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    expect(RuntimeError, "did not come", term.set_epoch, 1)
    return {how: ""}


def main(rank, size, folder, how):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}{how}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=3 if how else 60),
    )
    ranks = Ranks(rank, size)
    results = a_rank_that_does_not_come(ranks, how) if how else scenarios(ranks)
    if rank == 0:
        (folder / f"results{how}.json").write_text(json.dumps(results))
    if how:
        os._exit(0)  # a group that was left cannot be left in good order
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    for how in ("", *STOPS):
        # Forked, so that torch is imported once.
        context = mp.start_processes(
            main, (size, folder, how), size, join=False, start_method="fork"
        )
        # A rank that hangs is no reason to wait: the first one is looked at.
        for process in context.processes[: 1 if how else size]:
            process.join()
        for process in context.processes:
            process.kill()
