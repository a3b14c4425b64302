"""The terms to read give what the fast ones give."""

import inspect

import pytest
import torch
from problems import CLASSES, SAMPLES, batches, network
from torch.nn.functional import cross_entropy

from saltflat import MESA, SAF
from saltflat.terms.reference import ReferenceMESA, ReferenceSAF

SETTINGS = {"weight": 0.7, "temperature": 2.0, "start_epoch": 3}


def saf(kind, model):
    more = {"storage": "float32"} if kind is SAF else {}
    return kind(SAMPLES, CLASSES, lag=2, **SETTINGS, **more)


def mesa(kind, model):
    return kind(model, decay=0.95, **SETTINGS)


@pytest.mark.parametrize("make, kinds", [(saf, (SAF, ReferenceSAF)), (mesa, (MESA, ReferenceMESA))])
def test_the_losses_of_200_steps_are_the_same(make, kinds):
    """24 samples in batches of 8, so 3 steps an epoch."""
    traces, terms = [], []
    for kind in kinds:
        model = network()
        term = make(kind, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trace = []
        for epoch in range(67):
            term.set_epoch(epoch)
            for index, x, y in batches(epoch):
                logits = model(x)
                extra = term(logits, index if make is saf else x)
                optimizer.zero_grad()
                (cross_entropy(logits, y) + extra).backward()
                optimizer.step()
                if make is mesa:
                    term.update(model)
                trace.append(extra.detach())
        traces.append(torch.stack(trace))
        terms.append(model[0].weight.detach())
    assert len(traces[0]) == 201
    assert (traces[0][9:] > 0).all() and not traces[0][:9].any()
    torch.testing.assert_close(*traces, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(*terms, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", [ReferenceSAF, ReferenceMESA])
def test_a_term_to_read_is_short(kind):
    lines = [line for line in inspect.getsource(kind).splitlines() if line.strip()]
    assert len(lines) <= 40
