"""A closure that runs more than once a step: each call sees the same reference."""

from functools import partial

import pytest
import torch
from problems import CLASSES, SAMPLES, batches, network
from torch.nn.functional import cross_entropy

from saltflat import MESA, SAF, sam, trajectory_loss

CPU = torch.device("cpu")


def wrapped(make):
    return lambda model: make(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model
    )


OPTIMIZERS = {
    "sam": (wrapped(sam.SAM), {2}),
    "asam": (wrapped(sam.ASAM), {2}),
    "gsam": (wrapped(sam.GSAM), {2}),
    "looksam": (wrapped(partial(sam.LookSAM, interval=2)), {1, 2}),
    "lbfgs": (lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), {4}),
}


def test_every_pass_of_esam_sees_the_same_reference_of_saf():
    """Its closure takes rows and returns the loss of each."""
    model = network()
    optimizer = sam.ESAM(torch.optim.SGD(model.parameters(), lr=0.1), gamma=0.5, beta=1.0)
    saf = SAF(SAMPLES, CLASSES, lag=1, start_epoch=1, storage="float32")
    terms = []
    for epoch in range(3):
        saf.set_epoch(epoch)
        for index, x, y in batches(epoch):

            def closure(rows, index=index, x=x, y=y):
                rows = torch.arange(len(x)) if rows is None else rows
                logits = model(x[rows])
                terms.append(saf(logits, index[rows]))
                return cross_entropy(logits, y[rows], reduction="none") + terms[-1]

            optimizer.step(closure)
    calls = len(terms) // 9
    assert calls == 3 and all(term > 0 for term in terms[3 * calls :])
    assert saf.memory.written() == SAMPLES


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_call_of_a_step_sees_the_same_reference_of_saf(name):
    model = network()
    make, calls = OPTIMIZERS[name]
    optimizer = make(model)
    saf = SAF(SAMPLES, CLASSES, lag=1, start_epoch=1, storage="float32")
    before = torch.full((SAMPLES, CLASSES), torch.nan)
    seen = set()
    for epoch in range(4):
        saf.set_epoch(epoch)
        first = torch.full((SAMPLES, CLASSES), torch.nan)
        for index, x, y in batches(epoch):
            terms = []

            def closure(index=index, x=x, y=y, terms=terms, past=before, first=first):
                optimizer.zero_grad()
                logits = model(x)
                term = saf(logits, index)
                loss = cross_entropy(logits, y) + term
                loss.backward()
                if not terms:
                    first[index] = logits.detach()
                terms.append(term.item())
                if saf.active:
                    reference, valid = saf.memory.read(index, CPU)
                    assert valid.all()
                    assert torch.equal(reference, past[index])
                    torch.testing.assert_close(term, 0.3 * trajectory_loss(logits, reference))
                return loss

            optimizer.step(closure)
            seen.add(len(terms))
            assert all(term > 0 for term in terms) if epoch else not any(terms)
        slot = saf.state_dict()["memory.table"][epoch % 2]
        assert torch.equal(slot, first), "f(w) of the first pass is recorded, not f(w + e)"
        before = first
    assert seen == calls


@pytest.mark.parametrize("name", ["sam", "lbfgs"])
def test_every_call_of_a_step_has_mesas_loss(name):
    model = network()
    optimizer = OPTIMIZERS[name][0](model)
    mesa = MESA(model, start_epoch=1, decay=0.9)
    for epoch in range(3):
        mesa.set_epoch(epoch)
        for _, x, y in batches(epoch):
            terms = []

            def closure(x=x, y=y, terms=terms):
                optimizer.zero_grad()
                logits = model(x)
                terms.append(mesa(logits, x))
                loss = cross_entropy(logits, y) + terms[-1]
                loss.backward()
                return loss

            optimizer.step(closure)
            mesa.update(model)
            assert len(terms) > 1
            assert all(term > 0 for term in terms) if epoch else not any(terms)


def test_what_msam_records_is_of_its_one_pass():
    """MSAM climbs before its only pass: the outputs are f(w + e), as the paper's loss is."""
    model = network()
    optimizer = wrapped(sam.MSAM)(model)
    saf = SAF(SAMPLES, CLASSES, lag=1, start_epoch=1, storage="float32")
    for epoch in range(2):
        saf.set_epoch(epoch)
        for index, x, y in batches(epoch):
            terms = []

            def closure(index=index, x=x, y=y, terms=terms):
                optimizer.zero_grad()
                logits = model(x)
                terms.append(saf(logits, index))
                loss = cross_entropy(logits, y) + terms[-1]
                loss.backward()
                return loss

            optimizer.step(closure)
            assert [bool(term > 0) for term in terms] == [epoch == 1]
