"""Processes that train with SAF and MESA; run by test_exchange.py.

Every scenario is run by all ranks at the same time. Most compare SAF on all ranks with a twin that
each rank has for itself, in a group of one, and that is given the batches of all.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from problems import CLASSES, FEATURES, SAMPLES, dataset, network, same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from saltflat import MESA, SAF, OutputMemory, StickySampler, with_index
from saltflat._match import MATCHES
from saltflat.codecs import CODECS
from saltflat.core import cuda_graph
from saltflat.train.plan import Plan

STARTED = {"lag": 2, "start_epoch": 2}
EPOCHS = 6


class Ranks:
    """What a scenario is given."""

    def __init__(self, rank, size, folder):
        self.rank, self.size, self.folder = rank, size, folder
        self.alone = dist.new_group([rank], use_local_synchronization=True)

    def gathered(self, thing, group=None):
        things = [None] * dist.get_world_size(group)
        dist.all_gather_object(things, thing, group)
        return things

    def whole(self, saf, group=None):
        """The memory of all ranks as one."""
        parts = self.gathered(saf.memory.state_dict(), group)
        return {name: torch.cat([p[name] for p in parts], 1) for name in ("table", "stamps")}


def outputs(rows, *seed):
    seed = sum(number * 101**place for place, number in enumerate(seed))
    return 4 * torch.randn(rows, CLASSES, generator=torch.Generator().manual_seed(seed))


def sampled(num_samples, size, batch_size, epoch, drop_last=False):
    """The batches of an epoch: for each step, those of all ranks."""
    orders = []
    for rank in range(size):
        sampler = DistributedSampler(range(num_samples), size, rank, seed=7, drop_last=drop_last)
        sampler.set_epoch(epoch)
        orders.append(torch.tensor(list(sampler)).split(batch_size))
    return list(zip(*orders, strict=True))


def compare_with_twin(ranks, make, epochs, spoil=lambda logits, *where: logits, group=None):
    """Feed SAF a batch on each rank, and its twin all of them, and compare all they do.

    Args:
        ranks: This process and the others.
        make: Makes SAF, given a process group.
        epochs: For each epoch its steps, and for each step the ranks' batches.
        spoil: May change the logits of an epoch, a step and a rank.
        group: The ranks that train together, if not all do.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    saf, twin = make(process_group=group), make(process_group=ranks.alone)
    assert type(twin.memory) is OutputMemory
    seen = {}
    for name, term in (("saf", saf), ("twin", twin)):
        spy_on_references(term.memory, seen, name)
    compared = 0
    for epoch, steps in epochs.items():
        saf.set_epoch(epoch), twin.set_epoch(epoch)
        for step, batches in enumerate(steps):
            rows = [len(batch) for batch in batches]
            logits = [spoil(outputs(n, epoch, step, r), epoch, step, r) for r, n in enumerate(rows)]
            mine, everyones = logits[rank].clone(), torch.cat(logits)
            mine.requires_grad_(), everyones.requires_grad_()
            loss = saf(mine, batches[rank])
            expected = twin(everyones, torch.cat(batches))
            own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))

            parts = torch.stack(ranks.gathered(loss.detach(), group))
            torch.testing.assert_close(parts.mean(), expected.detach())
            if epoch < saf.start_epoch:
                assert loss == 0 and not loss.requires_grad
                continue
            if seen.keys() == {"saf", "twin"}:  # the kernels need not fetch from their own ring
                (reference, valid), (all_references, all_valid) = seen["saf"], seen["twin"]
                assert torch.equal(valid, all_valid[own])
                assert torch.equal(reference[valid], all_references[own][valid])
            compared += int(expected > 0)
            loss.backward(), expected.backward()
            torch.testing.assert_close(mine.grad / size, everyones.grad[own])
        parts = ranks.whole(saf, group)
        whole = twin.memory.state_dict()
        assert torch.equal(parts["stamps"], whole["stamps"])
        written = whole["stamps"] >= 0
        assert torch.equal(parts["table"][written], whole["table"][written])
    nonfinite = sum(ranks.gathered(saf.nonfinite_rows, group))
    assert nonfinite == twin.nonfinite_rows
    assert compared > 0
    return saf, twin


def spy_on_references(memory, seen, name):
    """Note what is fetched, in its stored form."""
    fetch = memory._fetch

    def spied(*args):
        stored, valid = fetch(*args)
        seen[name] = stored.clone(), valid.clone()
        return stored, valid

    memory._fetch = spied


def small(num_samples=SAMPLES, **kwargs):
    return partial(SAF, num_samples, CLASSES, **{**STARTED, **kwargs})


def every_storage_equals_one_process(ranks):
    """23 samples: a padded sampler, so duplicates; batches of 5, so a short last one."""
    epochs = {epoch: sampled(23, ranks.size, 5, epoch) for epoch in range(EPOCHS)}
    for storage in CODECS:
        compare_with_twin(ranks, small(23, storage=storage), epochs)


def drop_last_equals_one_process(ranks):
    """Samples that were left out have no reference, and the ranks have unequally many of them."""
    epochs = {epoch: sampled(29, ranks.size, 4, epoch, True)[:-1] for epoch in range(EPOCHS)}
    compare_with_twin(ranks, small(29), epochs)


def a_row_that_is_not_finite(ranks):
    def spoil(logits, epoch, step, rank):
        if (epoch, step) in {(1, 0), (3, 1)}:
            logits[rank, 1] = float("nan")
        return logits

    epochs = {epoch: sampled(24, ranks.size, 4, epoch) for epoch in range(EPOCHS)}
    compare_with_twin(ranks, small(24), epochs, spoil)


def a_few_steps(ranks):
    """Few enough for kernels that are interpreted."""

    def spoil(logits, epoch, step, rank):
        if (epoch, step, rank) == (1, 0, 0):
            logits[0, 1] = float("nan")
        return logits

    epochs = {epoch: sampled(7, ranks.size, 3, epoch)[:2] for epoch in range(4)}
    for storage in CODECS:
        make = small(7, lag=1, start_epoch=1, storage=storage)
        compare_with_twin(ranks, make, epochs, spoil)


def ragged_batches_and_skipped_epochs(ranks):
    """Another number of rows on each rank, none on the last; a sample everywhere and twice."""
    generator = torch.Generator().manual_seed(0)
    epochs = {}
    for epoch in (0, 1, 2, 3, 5, 7, 9):
        steps = []
        for _ in range(3):
            drawn = [
                torch.randint(11, (3 * (ranks.size - 1 - rank),), generator=generator)
                for rank in range(ranks.size)
            ]
            steps.append([torch.cat([drawn[0], drawn[0][:1]]), *drawn[1:-1], drawn[-1]])
        epochs[epoch] = steps
    compare_with_twin(ranks, small(11), epochs)
    compare_with_twin(ranks, small(11, lag=1, start_epoch=1), epochs)


def more_ranks_than_blocks(ranks):
    """Four samples on three ranks are two blocks: the last rank keeps nothing."""
    batches = [torch.tensor([rank, 3]) for rank in range(ranks.size)]
    saf, _ = compare_with_twin(ranks, small(4), {epoch: [batches] for epoch in range(4)})
    assert saf.memory.state_dict()["stamps"].shape == (2, 2 if ranks.rank < 2 else 0)


def host_and_file_tables(ranks):
    epochs = {epoch: sampled(24, ranks.size, 4, epoch) for epoch in range(4)}
    compare_with_twin(ranks, small(24, device="cpu"), epochs)
    path = ranks.folder / "table"

    def make(process_group):
        alone = process_group is ranks.alone
        twin = ranks.folder / f"twin{ranks.rank}"
        return small(24, path=twin if alone else path)(process_group=process_group)

    compare_with_twin(ranks, make, epochs)
    assert Path(f"{path}.{ranks.rank}").stat().st_size > 0
    assert not path.exists()


def a_share_of_the_memory(ranks):
    saf = SAF(600, 50)
    assert saf.memory.nbytes <= SAF.estimate_bytes(600, 50) / ranks.size + 200


def a_subgroup(ranks):
    """The first and the last rank train together, and the others must leave them alone."""
    members = [0, ranks.size - 1]
    group = dist.new_group(members)
    if ranks.rank in members:
        epochs = {epoch: sampled(23, 2, 5, epoch) for epoch in range(4)}
        compare_with_twin(ranks, small(23), epochs, group=group)
    else:
        expect(ValueError, "is not in the process_group", small(23), process_group=group)


def training(ranks, saf, model, batches, accumulate=1):
    """Train on the batches of each epoch's steps; each micro-batch is that of all ranks in turn."""
    x, y = dataset().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch, steps in batches.items():
        saf.set_epoch(epoch)
        for number, index in enumerate(steps):
            logits = model(x[index])
            loss = cross_entropy(logits, y[index]) + saf(logits, index)
            last = (number + 1) % accumulate == 0
            if isinstance(model, DistributedDataParallel) and not last:
                with model.no_sync():
                    (loss / accumulate).backward()
            else:
                (loss / accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def smooth():
    """A network without BatchNorm, on which parts of a batch equal the whole."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def training_equals_one_process(ranks):
    batch = SAMPLES // (4 * ranks.size)
    for accumulate in (1, 2):
        # Without its last steps an epoch leaves samples without a reference.
        epochs = {
            epoch: sampled(SAMPLES, ranks.size, batch, epoch)[: 4 - 2 * (epoch == 3)]
            for epoch in range(8)
        }
        make = small(SAMPLES, weight=1.0, storage="float32")
        mine = {e: [batches[ranks.rank] for batches in steps] for e, steps in epochs.items()}
        everyones = {e: [torch.cat(batches) for batches in steps] for e, steps in epochs.items()}
        model = DistributedDataParallel(smooth())
        ours = training(ranks, make(), model, mine, accumulate)
        alone = training(ranks, make(process_group=ranks.alone), smooth(), everyones, accumulate)
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)
        without = small(SAMPLES, weight=0.0)(process_group=ranks.alone)
        plain = training(ranks, without, smooth(), everyones, accumulate)
        assert (plain - alone).abs().max() > 1e-2  # or SAF did nothing


def the_three_lines(ranks):
    """A script for one process under a DistributedSampler."""
    data = with_index(dataset())
    sampler = DistributedSampler(data, shuffle=True)
    saf = SAF(len(data), CLASSES, **STARTED)
    model, terms = DistributedDataParallel(smooth()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        saf.set_epoch(epoch)
        sampler.set_epoch(epoch)
        for index, x, y in DataLoader(data, batch_size=4, sampler=sampler):
            logits = model(x)
            terms.append(saf(logits, index))
            (cross_entropy(logits, y) + terms[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (ranks.whole(saf)["stamps"] == torch.tensor([[2], [3]])).all()
    assert [bool(term > 0) for term in terms] == [False] * (len(terms) // 2) + [True] * (
        len(terms) // 2
    )


def a_table_for_each_rank_is_wrong(ranks):
    """The released code's fault: samples move, and the private table has 1/W of them."""
    samples = 600
    ours, naive = small(samples)(), small(samples)(process_group=ranks.alone)
    last, right, asked, seen = {}, Counter(), 0, {}
    for name, saf in (("ours", ours), ("naive", naive)):
        spy_on_references(saf.memory, seen, name)
    for epoch in range(4):
        ours.set_epoch(epoch), naive.set_epoch(epoch)
        for step, batches in enumerate(sampled(samples, ranks.size, 50, epoch)):
            logits = [outputs(len(batch), epoch, step, r) for r, batch in enumerate(batches)]
            index = batches[ranks.rank]
            for saf in (ours, naive):
                saf(logits[ranks.rank], index)
            if epoch >= 2:
                truth = torch.stack([last[epoch - 2, i] for i in index.tolist()]).half()
                asked += len(index)
                for name, (reference, valid) in seen.items():
                    right[name] += int((valid & (reference == truth).all(1)).sum())
            for batch, rows in zip(batches, logits, strict=True):
                last.update({(epoch, i): row for i, row in zip(batch.tolist(), rows, strict=True)})
    assert right["ours"] == asked
    assert abs(right["naive"] / asked - 1 / ranks.size) < 0.08


def own_samples_need_no_message(ranks):
    """StickySampler and exchange="own": one call to see that all are alike, and no other."""
    for storage in CODECS:
        saf = small(SAMPLES, exchange="own", storage=storage)()
        twin = small(SAMPLES, storage=storage)(process_group=ranks.alone)
        sampler = StickySampler(SAMPLES)
        orders = [
            StickySampler(SAMPLES, num_replicas=ranks.size, rank=r) for r in range(ranks.size)
        ]
        calls, losses, expected = Counter(), [], []
        with counted_collectives(calls):
            for epoch in range(EPOCHS):
                saf.set_epoch(epoch), sampler.set_epoch(epoch)
                for step, index in enumerate(torch.tensor(list(sampler)).split(4)):
                    losses.append(saf(outputs(len(index), epoch, step, ranks.rank), index))
        assert calls == {"all_reduce": 1}
        for epoch in range(EPOCHS):
            twin.set_epoch(epoch)
            for order in orders:
                order.set_epoch(epoch)
            batches = [torch.tensor(list(order)).split(4) for order in orders]
            for step, index in enumerate(zip(*batches, strict=True)):
                rows = [outputs(len(i), epoch, step, r) for r, i in enumerate(index)]
                expected.append(twin(torch.cat(rows), torch.cat(index)))
        means = torch.tensor(ranks.gathered([loss.item() for loss in losses])).mean(0)
        torch.testing.assert_close(means, torch.stack(expected))
        assert means.count_nonzero() > 0
        assert same(ranks.whole(saf)["stamps"], twin.memory.state_dict()["stamps"])


def counted_collectives(calls, sent=None):
    """Counts what is called of torch.distributed, and notes the bytes of what it fills."""

    class Counting:
        def __enter__(self):
            names = [
                n for n in dir(dist) if n.startswith(("all_", "broadcast", "reduce", "gather"))
            ]
            names += ["scatter", "send", "recv", "isend", "irecv", "barrier"]
            self.old = {name: getattr(dist, name) for name in names}
            for name, function in self.old.items():
                setattr(dist, name, partial(self.count, name, function))

        @staticmethod
        def count(name, function, *args, **kwargs):
            calls[name] += 1
            if sent is not None:
                sent.append((name, args[0].nbytes))
            return function(*args, **kwargs)

        def __exit__(self, *_):
            for name, function in self.old.items():
                setattr(dist, name, function)

    return Counting()


def messages_of_a_step(ranks):
    """Two before the start; then four, of which the last is not waited for."""
    calls, saf = Counter(), small(SAMPLES)()
    for epoch in range(4):
        saf.set_epoch(epoch)
        for step, batches in enumerate(sampled(SAMPLES, ranks.size, 4, epoch)):
            calls.clear()
            with counted_collectives(calls):
                saf(outputs(4, epoch, step, ranks.rank), batches[ranks.rank])
            agreed = {"all_reduce": 1} if step == 0 else {}
            wanted = Counter({"all_gather_into_tensor": 2, **agreed})
            if epoch >= 2:
                wanted += Counter({"all_to_all_single": 1, "all_reduce": 1})
            assert calls == wanted


def bytes_of_a_step(ranks):
    """What `saltflat bench --plan` computes is what is sent."""
    others = (ranks.size - 1) / ranks.size  # of what is gathered, the rest is one's own
    for storage in CODECS:
        saf, sent = small(SAMPLES, storage=storage)(), []
        for epoch in (0, 1, 2):
            saf.set_epoch(epoch)
            for step in range(2):
                sent.clear()
                with counted_collectives(Counter(), sent):
                    saf(outputs(4, epoch, step), torch.arange(4) + step)
        names = [name for name, _ in sent]
        assert names == ["all_gather_into_tensor", "all_to_all_single", "all_reduce",
                         "all_gather_into_tensor"]  # fmt: skip
        ask, fetch, count, give = (nbytes for _, nbytes in sent)
        plan = Plan(samples=SAMPLES, classes=CLASSES, batch=4, processes=ranks.size)
        received = {"ask": ask * others, "fetch": fetch * others, "count": count,
                    "give": give * others}  # fmt: skip
        assert plan.messages(storage) == received


def another_ranks_sample(ranks):
    saf = small(SAMPLES, exchange="own")()
    saf.set_epoch(0)
    own = range(ranks.rank * SAMPLES // ranks.size, (ranks.rank + 1) * SAMPLES // ranks.size)
    saf(outputs(1), torch.tensor([own.start]))
    message = f'within {own.start}..{own.stop - 1}, got .* exchange="own" a rank takes its own'
    for index in (own.start - 1, own.stop):
        expect(ValueError, message, saf, outputs(1), torch.tensor([index]))


def disagreement_is_named(ranks):
    """On every rank, whichever of them is the odd one."""
    for name, usual, odd in (
        ("num_samples", SAMPLES, SAMPLES + 1),
        ("num_classes", CLASSES, CLASSES + 1),
        ("weight", 0.3, 0.30001),
        ("temperature", 5.0, 4.0),
        ("lag", 2, 3),
        ("start_epoch", 4, 5),
        ("tau_squared", True, False),
        ("storage", "float16", "uint8"),
        ("exchange", "any", "own"),
        ("epoch", 0, 1),
    ):
        value = odd if ranks.rank == ranks.size - 1 else usual
        settings = {"num_samples": SAMPLES, "num_classes": CLASSES, "lag": 2, "epoch": 0}
        settings[name] = value
        epoch = settings.pop("epoch")
        saf = SAF(**settings)
        saf.set_epoch(epoch)
        logits = torch.zeros(1, saf.memory.num_classes)
        index = torch.tensor([saf.memory.state_dict().get("block", torch.zeros(1))[0].int()])
        message = rf"the ranks disagree on {name} \(here {value!r}\)"
        expect(RuntimeError, message, saf, logits, index)


def a_batch_larger_than_the_first(ranks):
    saf = small(SAMPLES)()
    saf.set_epoch(0)
    saf(outputs(3), torch.arange(3))
    saf(outputs(2), torch.arange(2))
    expect(ValueError, "a batch of 4 rows, but the largest .* was of 3", saf, outputs(4), range(4))
    saf.set_epoch(1)
    saf(outputs(4), torch.arange(4))


def a_part_of_the_state(ranks):
    """A rank continues from its own part, and takes no other."""

    def trained(saf, epochs):
        losses = []
        for epoch in epochs:
            saf.set_epoch(epoch)
            for step, batches in enumerate(sampled(23, ranks.size, 5, epoch)):
                index = batches[ranks.rank]
                losses.append(saf(outputs(len(index), epoch, step, ranks.rank), index))
        return torch.stack(losses)

    saf = small(23)()
    trained(saf, range(3))
    state = {name: tensor.clone() for name, tensor in saf.state_dict().items()}
    expected = trained(saf, range(3, 5))
    again = small(23)()
    trained(again, range(1))  # and so has outputs on their way, which must not come later
    memory = {name: state[f"memory.{name}"] for name in saf.memory.state_dict()}
    again.memory.load_state_dict(memory)
    assert same(dict(again.memory.state_dict()), memory)
    again.load_state_dict(state)
    assert same(dict(again.state_dict()), state)
    assert torch.equal(trained(again, range(3, 5)), expected)

    before = {name: tensor.clone() for name, tensor in again.state_dict().items()}
    others = ranks.gathered(state)[ranks.rank - 1]
    if others["memory.stamps"].shape == state["memory.stamps"].shape:
        expect(
            RuntimeError,
            "the loaded samples are .* of 23, those kept here",
            again.load_state_dict,
            others,
        )
    larger = small(24)(process_group=ranks.alone).state_dict()
    expect(RuntimeError, "belongs to a SAF with other settings", again.load_state_dict, larger)
    assert same(dict(again.state_dict()), before)
    one = small(len(state["memory.stamps"][0]))(process_group=ranks.alone)
    expect(RuntimeError, "the loaded samples are", one.load_state_dict, state)


def one_state_for_any_number_of_ranks(ranks):
    """What rank 0 gets is one process's state, and every rank, and one alone, takes it up."""
    for storage in ("float16", "uint8"):
        make = small(23, storage=storage)
        epochs = {epoch: sampled(23, ranks.size, 5, epoch) for epoch in range(4)}

        def spoil(logits, epoch, step, rank):
            if (epoch, step) == (1, 1):
                logits[rank % len(logits), 0] = float("nan")
            return logits

        saf, twin = compare_with_twin(ranks, make, epochs, spoil)
        expected = dict(twin.state_dict())
        whole = saf.whole_state_dict()
        assert same(dict(whole), expected) if ranks.rank == 0 else whole == {}
        again, alone = make(), make(process_group=ranks.alone)
        outer = torch.nn.ModuleDict({"term": again})  # and so under a prefix
        outer.load_state_dict({f"term.{name}": tensor for name, tensor in expected.items()})
        for name, tensor in saf.state_dict().items():
            if name != "_nonfinite":
                assert same(again.state_dict()[name], tensor), name
        assert sum(ranks.gathered(again.nonfinite_rows)) == twin.nonfinite_rows > 0
        if ranks.rank == 0:
            alone.load_state_dict(whole)
            assert same(dict(alone.whole_state_dict()), expected)
    single = small(1)()  # of which one rank has all, and the others nothing
    single.set_epoch(0)
    single(outputs(1, 3), torch.tensor([0]))
    state = ranks.gathered(single.whole_state_dict())[0]
    again = small(1)()
    again.load_state_dict(state)
    assert same(dict(again.state_dict()), dict(single.state_dict()))
    fresh = make()  # nothing was written, nor has it memory
    state = fresh.whole_state_dict()
    if ranks.rank == 0:
        assert same(dict(state), dict(make(process_group=ranks.alone).state_dict()))
    fresh.load_state_dict(twin.state_dict())
    for name in ("table", "stamps"):
        assert same(fresh.memory.state_dict()[name], saf.memory.state_dict()[name])


def parts_are_the_shards_of_one_table(ranks):
    """As a sharded checkpoint describes them, also inside another module."""
    epochs = {epoch: sampled(23, ranks.size, 5, epoch) for epoch in range(4)}
    saf, twin = compare_with_twin(ranks, small(23), epochs)
    state, expected = saf.sharded_state_dict(), twin.sharded_state_dict()
    assert state.keys() == expected.keys() == twin.state_dict().keys()
    for name in ("memory.table", "memory.stamps"):
        assert torch.equal(state[name].full_tensor(), expected[name])
    holder = nn.ModuleDict({"saf": small(23)()})
    holder.load_state_dict({f"saf.{name}": value for name, value in state.items()})
    assert same(dict(holder["saf"].state_dict()), dict(saf.state_dict()))
    other = small(23, lag=3)()
    expect(RuntimeError, "with other settings. Nothing was loaded", other.load_state_dict, state)


def a_compiled_loss(ranks):
    """The call is left out of the graph, and the numbers are the same."""
    plain, compiled = small(SAMPLES)(), small(SAMPLES)()

    @torch.compile(backend="eager")
    def loss_part(logits, index):
        return compiled(2 * logits, index) + 1

    for epoch in range(4):
        plain.set_epoch(epoch), compiled.set_epoch(epoch)
        for step, batches in enumerate(sampled(SAMPLES, ranks.size, 4, epoch)):
            logits, index = outputs(4, epoch, step, ranks.rank), batches[ranks.rank]
            torch.testing.assert_close(loss_part(logits, index), plain(2 * logits, index) + 1)


def teachers_stay_the_same(ranks):
    """MESA's teacher, buffers included, with other data and another start on each rank."""
    for kwargs in ({}, {"broadcast_buffers": False}):
        model = network(seed=ranks.rank)
        mesa = MESA(model, start_epoch=0, decay=0.9)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of another name
            ddp = DistributedDataParallel(model, **kwargs)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(ranks.rank)
        for epoch in range(3):
            mesa.set_epoch(epoch)
            for _ in range(3):
                x = torch.randn(5, FEATURES, generator=generator)
                y = torch.randint(CLASSES, (5,), generator=generator)
                logits = ddp(x)
                optimizer.zero_grad()
                (cross_entropy(logits, y) + mesa(logits, x)).backward()
                optimizer.step()
                mesa.update(model if kwargs else ddp)
                state = dict(mesa.teacher.state_dict())
                assert all(same(other, state) for other in ranks.gathered(state))
        mean = model[1].running_mean
        assert not all(torch.equal(other, mean) for other in ranks.gathered(mean))


def teachers_outputs_are_matched_over_all_batches(ranks):
    """The gradients of a model without BatchNorm are those of one process with all batches."""
    for match in MATCHES:
        model = smooth()
        mesa = MESA(model, start_epoch=0, match=match)
        alone = MESA(model, start_epoch=0, match=match, process_group=ranks.alone)
        for term in (mesa, alone):
            term.set_epoch(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
        generator = torch.Generator().manual_seed(ranks.rank)
        x = (1 + ranks.rank) * torch.randn(5, FEATURES, generator=generator)
        whole = torch.cat(ranks.gathered(x))
        parts = [mesa(model(x), x), alone(model(whole), whole)]
        found, expected = (torch.autograd.grad(part, list(model.parameters())) for part in parts)
        for mine, all_of_them in zip(found, expected, strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine / ranks.size, all_of_them)


def teachers_alone(ranks):
    """In a group of one, and without buffers, an update sends nothing but the start."""
    model, calls = network(), Counter()
    mesa, bare = MESA(model, process_group=ranks.alone), MESA(smooth())
    other = smooth()
    with counted_collectives(calls):
        for _ in range(3):
            mesa.update(model)
            bare.update(other)
    assert calls == {"broadcast": 2}  # the count of updates, and the tensors


def teachers_that_one_rank_touches(ranks):
    """Rank 0 alone has loaded a teacher before training, and evaluates its own between steps."""
    model = network()
    mesa = MESA(model, start_epoch=0)
    if ranks.rank == 0:
        trained = MESA(network(seed=3), start_epoch=0, process_group=ranks.alone)
        for _ in range(40):
            trained.update(network(seed=3))
        mesa.load_state_dict(trained.state_dict())
    for step in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * (step + 1)
        mesa.update(model)
        if ranks.rank == 0:
            mesa.teacher.to("cpu")  # which changes nothing, and makes it look again
        state = dict(mesa.teacher.state_dict())
        assert all(same(other, state) for other in ranks.gathered(state))
    assert mesa.teacher.updates == 44


def a_teacher_that_is_frozen(ranks):
    """Rank 0 alone has loaded it: the first step makes all alike, and nothing is sent after."""
    model, calls = network(), Counter()
    mesa = MESA(model, start_epoch=0, freeze_epoch=1)
    if ranks.rank == 0:
        trained = MESA(network(seed=3), start_epoch=0, process_group=ranks.alone)
        for _ in range(40):
            trained.update(network(seed=4))
        mesa.load_state_dict(trained.state_dict())
    mesa.set_epoch(1)
    before = ranks.gathered(dict(mesa.teacher.module.state_dict()))[0]
    mesa.update(model)
    with counted_collectives(calls):
        mesa.update(model)
    assert not calls and mesa.teacher.updates == 42
    assert same(dict(mesa.teacher.module.state_dict()), before)


def copies_share_their_group(ranks):
    group = dist.new_group(range(ranks.size))
    saf, mesa = SAF(SAMPLES, CLASSES, process_group=group), MESA(network(), process_group=group)
    for one in (saf, mesa):
        copied = copy.deepcopy(one)
        assert same(dict(copied.state_dict()), dict(one.state_dict()))
        expect(TypeError, "a process group cannot be pickled", pickle.dumps, one)
    copied.update(network())


def what_was_sent_before_a_capture(ranks):
    """A recording must not wait for it, nor write it again in every replay."""
    saf = small(SAMPLES)()
    saf.set_epoch(0)
    saf(outputs(4, 0), torch.arange(4))
    before = cuda_graph.capturing
    try:
        cuda_graph.capturing = lambda: True
        expect(RuntimeError, "call saf.settle", saf, outputs(4, 1), torch.arange(4))
        cuda_graph.capturing = before
        saf.settle()
        cuda_graph.capturing = lambda: True
        saf(outputs(4, 1), torch.arange(4))
    finally:
        cuda_graph.capturing = before
    assert saf.memory._arriving is None


def expect(kind, message, function, *args, **kwargs):
    """As pytest.raises, which is not in these processes."""
    try:
        function(*args, **kwargs)
    except kind as error:
        assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}: {message}")


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        every_storage_equals_one_process,
        drop_last_equals_one_process,
        a_row_that_is_not_finite,
        a_few_steps,
        ragged_batches_and_skipped_epochs,
        more_ranks_than_blocks,
        host_and_file_tables,
        a_share_of_the_memory,
        a_subgroup,
        training_equals_one_process,
        the_three_lines,
        a_table_for_each_rank_is_wrong,
        own_samples_need_no_message,
        messages_of_a_step,
        bytes_of_a_step,
        another_ranks_sample,
        disagreement_is_named,
        a_batch_larger_than_the_first,
        a_part_of_the_state,
        one_state_for_any_number_of_ranks,
        parts_are_the_shards_of_one_table,
        a_compiled_loss,
        teachers_stay_the_same,
        teachers_outputs_are_matched_over_all_batches,
        teachers_alone,
        teachers_that_one_rank_touches,
        a_teacher_that_is_frozen,
        copies_share_their_group,
        what_was_sent_before_a_capture,
    )
}


def scenarios(rank, size, folder, *names):
    """Run those that are named, or all."""
    early = SAF(4, 3)
    join(rank, size, folder, seconds=60)
    ranks = Ranks(rank, size, folder)
    expect(RuntimeError, "build it after init_process_group", early.set_epoch, 0)
    for name in names or SCENARIOS:
        SCENARIOS[name](ranks)
        say(folder, rank, name)


def a_rank_that_stops(rank, size, folder, how):
    """The last rank leaves in the middle of an epoch; the others say what they waited for."""
    join(rank, size, folder, seconds=3)
    saf = small(SAMPLES)()
    saf.set_epoch(0)
    index = torch.arange(4)
    saf(outputs(4), index)
    if rank == size - 1:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    expect(RuntimeError, "SAF could not .* another rank has stopped, hangs", saf, outputs(4), index)
    say(folder, rank, "said so")
    os._exit(0)  # a group that was left cannot be left in good order


def join(rank, size, folder, seconds):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def say(folder, rank, line):
    with (folder / f"said.{rank}").open("a") as file:
        print(line, file=file)


def main(rank, what, size, folder, *args):
    try:
        {"scenarios": scenarios, "stops": a_rank_that_stops}[what](rank, size, folder, *args)
    except BaseException:
        say(folder, rank, traceback.format_exc())
        raise


if __name__ == "__main__":
    what, size, folder, *args = sys.argv[1:]
    # Forked, so that torch is imported once.
    context = mp.start_processes(
        main, (what, int(size), Path(folder), *args), int(size), join=False, start_method="fork"
    )
    # A rank that hangs is no reason to wait: it is the others that are looked at.
    waited_for = context.processes[:-1] if what == "stops" else context.processes
    for process in waited_for:
        process.join()
    for process in context.processes:
        process.kill()
    sys.exit(any(process.exitcode for process in waited_for))
