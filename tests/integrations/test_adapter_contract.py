"""What every adapter keeps, for the library's terms and for foreign ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapters import BATCHES, EPOCHS, FRAMEWORKS, INDEXED, TERMS, plain
from problems import SAMPLES, same

import saltflat

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::accelerate"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
every_framework = pytest.mark.parametrize("name", FRAMEWORKS)
every_term = pytest.mark.parametrize("method", TERMS)


def train(name, method, folder, **how):
    """The given framework; without an index where the term needs none."""
    how = {"indexed": method in INDEXED, **how}
    return FRAMEWORKS[name](TERMS[method], folder, **how)


@every_framework
@every_term
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_the_plain_loop(name, method, accumulate, tmp_path):
    found = train(name, method, tmp_path, accumulate=accumulate)
    assert len(found.rows) == EPOCHS * BATCHES
    assert sorted(torch.cat(found.rows[:BATCHES]).tolist()) == list(range(SAMPLES))
    net, term, losses = plain(TERMS[method], found.rows, accumulate)
    torch.testing.assert_close(found.losses, losses, rtol=0, atol=0)
    assert same(dict(found.net.state_dict()), dict(net.state_dict()))
    state = found.term.state_dict()  # "net." is the Trainer's model around the network
    assert same({key.replace("net.", ""): state[key] for key in state}, dict(term.state_dict()))
    logged = [each["trajectory_loss"] for each in found.metrics if "trajectory_loss" in each]
    assert min(logged[len(logged) // EPOCHS :], default=1) > 0


@every_framework
@every_term
def test_a_resumed_training_equals_one_straight_through(name, method, tmp_path):
    straight = train(name, method, tmp_path / "straight")
    first = train(name, method, tmp_path / "halves", until=2)
    second = train(name, method, tmp_path / "halves", resume=True)
    assert same(first.losses + second.losses, straight.losses)
    assert same(dict(second.net.state_dict()), dict(straight.net.state_dict()))
    assert same(dict(second.term.state_dict()), dict(straight.term.state_dict()))


@every_framework
@pytest.mark.parametrize("method", INDEXED)
def test_a_missing_index_is_refused(name, method, tmp_path):
    with pytest.raises(ValueError, match="index"):
        train(name, method, tmp_path, indexed=False)


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
@pytest.mark.parametrize("form", ["dictionaries", "own collate"])
@pytest.mark.parametrize("method", TERMS)
def test_dictionaries_and_a_collate_function_of_ones_own(name, form, method, tmp_path):
    found = train(name, method, tmp_path, form=form)
    net, _, losses = plain(TERMS[method], found.rows)
    assert same(found.losses, losses)
    assert same(dict(found.net.state_dict()), dict(net.state_dict()))


@pytest.mark.parametrize("name", ["lightning", "transformers"])  # the others' loop is the user's
@pytest.mark.parametrize("method", ["saf", "mesa", "near"])
def test_a_term_that_never_starts_is_worth_a_warning(name, method, tmp_path):
    with pytest.warns(UserWarning, match=r"starts in epoch 1, .*num_train_epochs=1|max_epochs=1"):
        train(name, method, tmp_path, until=1)


def test_every_framework_on_two_processes(tmp_path):
    """Equal to one process, and to the bit after a checkpoint."""
    script = Path(__file__).with_name("adapters_on_ranks.py")
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert set(FRAMEWORKS) <= set(result.stdout.split()), result.stderr
    assert result.returncode == 0


def test_no_adapter_asks_for_the_class_of_a_term():
    for path in (Path(saltflat.__file__).parent / "integrations").glob("*.py"):
        assert not re.search(r"isinstance\([^)]*\b(SAF|MESA)\b", path.read_text()), path.name
