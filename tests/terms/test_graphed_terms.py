"""Terms in a GraphedStep: replays equal eager steps, with the tape as the graph."""

import copy
from types import FunctionType, MethodType

import pytest
import torch
from problems import CLASSES, SAMPLES, batches, network, same
from tape import TapedStep
from terms.thin_auto_saf import ThinAutoSAF
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from saltflat.core.cuda_graph import GraphedStep, all_parts, withhold_ticks
from saltflat.terms import MESA, SAF, Batch, Shuffled, Uniform

TERMS = {
    "saf": lambda model: SAF(SAMPLES, CLASSES, lag=2, start_epoch=2),
    "saf in uint8": lambda model: SAF(SAMPLES, CLASSES, lag=1, start_epoch=1, storage="uint8"),
    "mesa": lambda model: MESA(model, start_epoch=1, decay=0.9, freeze_epoch=4),
    "mesa with all": lambda model: MESA(
        model, start_epoch=2, decay=0.9, warmup=True, rescale=True, average_std=True
    ),
    "uniform": lambda model: Uniform(start_epoch=1),
    "shuffled": lambda model: Shuffled(SAMPLES, CLASSES, lag=1, start_epoch=2),
    "auto_saf": lambda model: ThinAutoSAF(SAMPLES, CLASSES, judge_epoch=3),
}
KEYS = {"mesa": 3, "uniform": 2, "auto_saf": 2}
every_term = pytest.mark.parametrize("name", TERMS)


def run(name, epochs=range(12), kind=None, batch_size=6):
    """A training run, eagerly or in a GraphedStep; 24 samples, so 4 steps an epoch."""
    model = network()
    term = TERMS[name](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)

    def step(index, x, y):
        optimizer.zero_grad()
        logits = model(x)
        loss = term(logits, Batch(index, ((x,), {}), y))
        if not term.replaces_loss:
            loss = loss + cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        term.update(model)
        return loss.detach()

    graphed = kind(step, [term, optimizer], warmup=2) if kind else step
    losses = []
    for epoch in epochs:
        term.set_epoch(epoch)
        losses += [graphed(*batch).clone() for batch in batches(epoch, batch_size)]
    return losses, model, term, graphed


@every_term
def test_replays_equal_eager_steps(name):
    losses, model, term, graphed = run(name, kind=TapedStep)
    expected, twin, eager, _ = run(name)
    assert len(graphed.captures) == KEYS.get(name, 2)
    assert same(losses, expected)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    assert same(dict(term.state_dict()), dict(eager.state_dict()))
    assert (term._steps, term.active) == (eager._steps, True)


def test_a_last_smaller_batch_has_a_graph_of_its_own():
    """5, 5, 5, 5 and 4 rows."""
    losses, model, _, graphed = run("saf", kind=TapedStep, batch_size=5)
    expected, twin, *_ = run("saf", batch_size=5)
    assert same(losses, expected)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    # Before the start there are two of the smaller batches, both to warm up.
    assert [shapes[0][0] for shapes in graphed.captures] == [5, 5, 4]


def host_state(thing, seen=None):
    """All that is not in a tensor; of tensors, where they are."""
    seen = {} if seen is None else seen
    if id(thing) in seen:
        return "seen"
    if isinstance(thing, Tensor):
        return "tensor", thing.data_ptr(), tuple(thing.shape)
    if isinstance(thing, dict):
        seen[id(thing)] = thing
        return {str(key): host_state(value, seen) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set):
        return [host_state(value, seen) for value in thing]
    if isinstance(thing, type | FunctionType | MethodType) or not hasattr(thing, "__dict__"):
        return repr(thing)
    seen[id(thing)] = thing
    return type(thing).__name__, host_state(vars(thing), seen)


@every_term
def test_no_host_state_changes_inside_a_step(name):
    """After one first step, what Python counts is in `tick`."""
    model = network()
    term = TERMS[name](model)
    seen_change = False
    for epoch in range(6):
        term.set_epoch(epoch)
        for number, (index, x, y) in enumerate(batches(epoch)):
            before = host_state(term)
            with withhold_ticks():
                term(model(x), Batch(index, ((x,), {}), y))
                term.update(model)
            if number or epoch:
                assert host_state(term) == before
            for part in all_parts([term]):
                part.tick()
            seen_change = seen_change or host_state(term) != before
    assert seen_change, "or nothing is looked at"


@every_term
def test_a_key_changes_where_python_decides(name):
    model = network()
    term = TERMS[name](model)
    keys = []
    for epoch in range(6):
        term.set_epoch(epoch)
        term.update(model)
        keys.append(key(term))
    assert len(set(keys)) == KEYS.get(name, 2)
    term.eval()
    assert key(term) not in keys
    hash(key(term))
    assert isinstance(term, nn.Module) and key(copy.deepcopy(term)) == key(term)


def key(term):
    return tuple(part.graph_key() for part in all_parts([term]))


def test_a_terms_own_tick_counts_the_same_steps_everywhere():
    class Counting(Uniform):
        ticks = 0

        def tick(self):
            super().tick()
            self.ticks += 1

    for step in (None, GraphedStep):
        term = Counting(start_epoch=0)
        term.set_epoch(0)
        call = term if step is None else step(term, [term])
        for _ in range(5):
            call(torch.randn(3, 4))
        assert term.ticks == term._steps == 5
