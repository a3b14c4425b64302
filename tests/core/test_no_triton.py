"""A CPU call of a term leaves Triton out: importing it takes a second, and old versions break."""

import subprocess
import sys

import pytest

# No optimizer is built: torch's own import triton.
CALL = """
import sys
import torch
from torch import nn
from saltflat import MESA, SAF

x, index, model = torch.randn(8, 3), torch.arange(8), nn.Linear(3, 4)
{make}
for epoch in range(3):
    term.set_epoch(epoch)
    logits = model(x)
    loss = term(logits, {second}) + logits.sum()
    loss.backward()
    {update}
assert "triton" not in sys.modules
assert loss != logits.sum(), "the term was never on"
"""

TERMS = {
    "saf": ("term = SAF(8, 4, lag=1, start_epoch=1)", "index", "nn.init.normal_(model.weight)"),
    "mesa": (
        "term = MESA(model, decay=0.5, start_epoch=1)",
        "x",
        "nn.init.normal_(model.weight); term.update(model)",
    ),
}


@pytest.mark.parametrize("term", TERMS)
def test_a_cpu_call_leaves_triton_unimported(term):
    make, second, update = TERMS[term]
    code = CALL.format(make=make, second=second, update=update)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
