import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from saltflat.train import Config, DataConfig, Interrupted, MethodConfig, fit
from saltflat.train.augment import test_batches as plain_batches_of_the_test_set
from saltflat.train.checkpoint import load_checkpoint
from saltflat.train.data import load_data
from saltflat.train.evaluate import TestSet, accuracies, training_batches
from saltflat.train.runs import open_run

SMALL = Config(data=DataConfig(train_size=96, batch_size=32, label_noise=0.1), epochs=2)
METHODS = {
    "base": {},
    "ema": {"decay": 0.9},
    "mesa": {"start_epoch": 1, "decay": 0.9},
    "saf": {"lag": 1, "start_epoch": 1},
}


@pytest.mark.parametrize(("name", "settings"), METHODS.items())
def test_an_opened_run_is_as_good_as_it_was(name, settings, tmp_path):
    config = replace(SMALL, method=MethodConfig(name, settings))
    run = fit(config, tmp_path)
    torch.manual_seed(5)
    random = torch.get_rng_state()
    opened = open_run(tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    assert (opened.config, opened.epochs, opened.folder) == (config, 2, tmp_path)
    assert not any(module.training for module in opened.model.modules())
    assert (opened.teacher is not None) == (name in ("ema", "mesa"))
    models = {"accuracy": opened.model}
    models |= {} if opened.teacher is None else {"teacher_accuracy": opened.teacher}
    test_set = TestSet(config, opened.data, opened.device)
    found = accuracies(config, test_set, models, opened.device)
    assert found == {name: getattr(run, name) for name in models}


def test_a_run_that_was_stopped_has_the_weights_of_that_step(tmp_path):
    with pytest.raises(Interrupted):
        fit(SMALL, tmp_path, stop=lambda *now: now == (1, 2))
    opened = open_run(tmp_path, device="cpu")
    assert opened.epochs == 1
    weights = load_checkpoint(tmp_path)[0]
    assert all(torch.equal(weights[k], t) for k, t in opened.model.state_dict().items())


def test_the_images_are_a_seeded_part_of_the_training_set(tmp_path):
    fit(SMALL, tmp_path)
    opened = open_run(tmp_path)
    data = opened.data
    everything = replace(data, test=data.train)
    ((images, labels),) = plain_batches_of_the_test_set(everything, 96)
    for seed in (0, 1):
        order = torch.from_numpy(np.random.default_rng([seed, 1]).permutation(96))
        for count in (1, 40, 96, 1000):
            ((x, y),) = opened.batches(count, seed=seed)
            assert torch.equal(x, images[order[:count]]) and torch.equal(y, labels[order[:count]])
    with pytest.raises(ValueError, match="images must be at least 1, got 0"):
        opened.batches(0)


def test_many_images_come_in_batches(device):
    data = load_data(DataConfig(train_size=600))
    batches = training_batches(data, 520, device)
    assert [len(x) for x, _ in batches] == [256, 256, 8]
    assert all(part.device.type == device.type for batch in batches for part in batch)


def test_what_cannot_be_opened(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="nowhere holds no run: there is no such folder"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no run: there is no config.json"):
        open_run(tmp_path)
    run = tmp_path / "compared" / "base" / "seed0"
    fit(SMALL, run)
    with pytest.raises(ValueError, match=r"compared holds no run: name those inside, as .*seed0"):
        open_run(tmp_path / "compared")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no GPU here: say device cpu"):
        open_run(run, device="cuda")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match=r"no checkpoint yet: .* saltflat train --resume .*seed0"):
        open_run(run)


def test_data_that_changed_are_noticed(tmp_path):
    x, y = np.arange(64 * 64, dtype="uint8").reshape(64, 8, 8), np.arange(64) % 2
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    fit(replace(SMALL, data=DataConfig(str(file), batch_size=32)), tmp_path / "run")
    np.savez(file, x_train=x[::-1], y_train=y, x_test=x, y_test=y)
    with pytest.raises(ValueError, match="have changed since it was saved: bring them back"):
        open_run(tmp_path / "run")


def test_the_images_are_not_those_with_wrong_labels():
    clean, noisy = (load_data(DataConfig(label_noise=share)) for share in (0.0, 0.2))
    wrong = {tuple(image.flatten().tolist()) for image in noisy.train.images[
        clean.train.labels != noisy.train.labels]}  # fmt: skip
    assert len(wrong) == 200
    batches = training_batches(replace(noisy, mean=(0.0,), std=(1.0,)), 200, torch.device("cpu"))
    taken = [tuple(image.flatten().tolist()) for x, _ in batches for image in x]
    assert 20 < sum(image in wrong for image in taken) < 60
