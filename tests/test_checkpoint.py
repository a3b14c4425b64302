import errno
import json
from pathlib import Path

import pytest
import torch
from problems import Run, same
from safetensors import SafetensorError
from torch import nn

from saltflat.train import checkpoint
from saltflat.train.checkpoint import (
    MANIFEST,
    STATE,
    WEIGHTS,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)

STATE_OF_ALL_KINDS = {
    "tensors": {
        "float": torch.tensor([0.1, -0.0, float("inf")]),
        "bf16": torch.randn(2, 3).to(torch.bfloat16),
        "int": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "byte": torch.get_rng_state(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "expanded": torch.zeros(()).expand(5, 2),
    },
    "plain": [None, True, 7, 0.1 + 0.2, "word", (1, 2)],
    "by number": {0: {"momentum_buffer": torch.ones(2)}, 1: {}},
}


def save(run, step):
    """A checkpoint whose content says which it is."""
    return save_checkpoint(run, step, {"w": torch.full((100,), float(step))}, {"step": step})


def loaded_step(run):
    weights, state = load_checkpoint(run)
    assert (weights["w"] == state["step"]).all()
    return state["step"]


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_all_kinds_of_state_come_back(tmp_path):
    weights = {
        "matrix": torch.randn(3, 4).T,
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "count": torch.tensor(5),
        "half": torch.randn(3).half(),
    }
    assert load_checkpoint(tmp_path) is None
    path = save_checkpoint(tmp_path, 12, weights, STATE_OF_ALL_KINDS)
    assert path == tmp_path / "checkpoints" / "000000012"
    assert sorted(file.name for file in path.iterdir()) == sorted([WEIGHTS, STATE, MANIFEST])
    loaded, state = load_checkpoint(tmp_path)
    assert same(loaded, weights)
    assert same(state, STATE_OF_ALL_KINDS)


def test_a_run_goes_on_bit_for_bit(tmp_path):
    whole, begun, rest = Run(), Run(), Run()
    whole.epoch(0)
    begun.epoch(0, stop=1)
    parts = begun.state()
    save_checkpoint(tmp_path, 1, parts["model"], {"optimizer": parts["optimizer"]})
    weights, state = load_checkpoint(tmp_path)
    rest.load({"model": weights, **state})
    rest.epoch(0, skip=1)
    assert same(dict(rest.model.state_dict()), dict(whole.model.state_dict()))


@pytest.mark.parametrize(
    "other", [lambda w: w, lambda w: w[1:], lambda w: w.T], ids=["tied", "part", "turned"]
)
def test_weights_that_share_a_storage_come_back(tmp_path, other):
    w = torch.randn(4, 4)
    weights = {"embedding": w, "head": other(w)}
    save_checkpoint(tmp_path, 1, weights, {})
    assert same(load_checkpoint(tmp_path)[0], weights)


def test_a_model_with_tied_weights_comes_back_tied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    save_checkpoint(tmp_path, 1, model.state_dict(), {})
    other.load_state_dict(load_checkpoint(tmp_path)[0])
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other[1].weight is other[0].weight
    assert model[1].weight is model[0].weight


def test_the_last_two_are_kept_in_the_order_of_their_steps(tmp_path):
    for step in (2, 9, 10, 100):
        save(tmp_path, step)
        assert loaded_step(tmp_path) == step
    assert names(tmp_path) == ["000000010", "000000100"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["000000100", "000000010"]


def test_the_same_step_again_replaces_the_first(tmp_path):
    save(tmp_path, 1)
    save_checkpoint(tmp_path, 1, {"w": torch.zeros(1)}, {"step": "again"})
    assert load_checkpoint(tmp_path)[1] == {"step": "again"}
    assert names(tmp_path) == ["000000001"]


def test_what_is_not_a_checkpoint_is_ignored(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    (folder / "000000007.partial").mkdir()
    (folder / "notes").mkdir()
    (folder / "000000008").write_text("a file")
    assert loaded_step(tmp_path) == 1
    assert [path.name for path in list_checkpoints(tmp_path)] == ["000000001"]


def half_written(state, path):
    """torch.save on a disk that fills up."""
    Path(path).write_bytes(b"PK\x03\x04 half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def refused(weights, path):
    """safetensors on a disk that fills up; its error is no OSError."""
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("module", "function", "fails"),
    [(torch, "save", half_written), (checkpoint, "save_file", refused)],
)
def test_a_full_disk_leaves_the_last_good_one_and_names_it(
    tmp_path, monkeypatch, module, function, fails
):
    with monkeypatch.context() as full:
        full.setattr(module, function, fails)
        with pytest.raises(CheckpointError, match=r"No space left on device.*good one is none"):
            save(tmp_path, 1)
    assert load_checkpoint(tmp_path) is None
    good = save(tmp_path, 1)
    with monkeypatch.context() as full:
        full.setattr(module, function, fails)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            save(tmp_path, 2)
    assert f"The last good one is {good}" in str(error.value)
    assert names(tmp_path) == ["000000001"]  # nothing half-done fills the disk
    assert loaded_step(tmp_path) == 1
    save(tmp_path, 2)
    assert loaded_step(tmp_path) == 2


def test_a_disk_that_refuses_safetensors_really_raises_that_error(tmp_path):
    with pytest.raises(SafetensorError):
        checkpoint.save_file({"w": torch.zeros(1)}, tmp_path / "missing" / WEIGHTS)


@pytest.mark.parametrize("at", ["save", "rename"])
def test_a_killed_process_leaves_the_one_before_and_the_next_may_write(tmp_path, monkeypatch, at):
    def killed(*args):
        raise SystemExit

    save(tmp_path, 1)
    with monkeypatch.context() as dying:
        dying.setattr(*((torch, "save") if at == "save" else (Path, "rename")), killed)
        with pytest.raises(SystemExit):
            save(tmp_path, 2)
    assert "000000002.partial" in names(tmp_path)
    assert loaded_step(tmp_path) == 1
    save(tmp_path, 2)
    assert loaded_step(tmp_path) == 2
    assert names(tmp_path) == ["000000001", "000000002"]


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def flipped(share):
    def flip(path):
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flip


DAMAGE = {
    "truncated": truncated,
    "emptied": emptied,
    "removed": Path.unlink,
    "first bit": flipped(0.0),
    "a bit inside": flipped(0.6),
    "last bit": flipped(1.0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("file", [WEIGHTS, STATE, MANIFEST])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_named(tmp_path, file, damage):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad / file)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path)
    assert f"{bad} is damaged" in str(error.value)
    assert f"remove it to continue from {good}" in str(error.value)
    for path in bad.iterdir():
        path.unlink()
    bad.rmdir()
    assert loaded_step(tmp_path) == 1
    damage(good / file)
    with pytest.raises(CheckpointError, match="there is no earlier one"):
        load_checkpoint(tmp_path)


class Payload:
    """A pickle that runs code when it is loaded."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_state_that_would_run_code_is_refused(tmp_path):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    target = tmp_path / "executed"
    torch.save({"step": 2, "payload": Payload(target)}, bad / STATE)
    manifest = json.loads((bad / MANIFEST).read_text())
    manifest["sums"][STATE] = checkpoint._sum(bad / STATE)  # its author would see to that
    (bad / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path)
    assert str(good) in str(error.value)
    assert not target.exists()
    torch.load(bad / STATE, weights_only=False)
    assert target.exists()  # it would have
