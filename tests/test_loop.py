import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from saltflat.sharpness import sam_sharpness
from saltflat.train import (
    Config,
    DataConfig,
    Interrupted,
    MethodConfig,
    OptimizerConfig,
    fit,
    folder,
)
from saltflat.train import (
    state as state_module,
)
from saltflat.train.augment import TrainLoader
from saltflat.train.checkpoint import load_checkpoint
from saltflat.train.data import load_data
from saltflat.train.log import read_metrics, write_metrics
from saltflat.train.methods import METHODS
from saltflat.train.models import build_model
from saltflat.train.runs import open_run

SMALL = Config(
    data=DataConfig(train_size=160, batch_size=32, augment="basic", label_noise=0.1),
    optimizer=OptimizerConfig(lr=0.05, warmup_epochs=1),
    epochs=5,
)


def of(name, **settings):
    known = METHODS[name].settings()
    early = {k: v for k, v in {"lag": 1, "start_epoch": 2}.items() if k in known}
    return replace(SMALL, method=MethodConfig(name, {**early, **settings}))


def weights(run):
    return load_checkpoint(run)[0]


def assert_same(run, other):
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for mine, his in zip(read_metrics(run), read_metrics(other), strict=True):
        assert {**mine, "seconds": 0} == {**his, "seconds": 0}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [(0, 2), (3, 3), (4, 5)])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(name, stop, tmp_path):
    config = of(name)
    straight = fit(config, tmp_path / "straight")
    with pytest.raises(Interrupted):
        fit(config, tmp_path / "stopped", stop=lambda *now: now == stop)
    assert not (tmp_path / "stopped" / folder.RESULT).exists()
    torch.manual_seed(99)
    resumed = fit(config, tmp_path / "stopped")
    assert_same(tmp_path / "straight", tmp_path / "stopped")
    assert resumed.accuracy == straight.accuracy


@pytest.mark.parametrize("name", ["base", "saf", "mesa", "sam"])
def test_tracking_the_sharpness_changes_nothing_else(name, tmp_path):
    plain, tracked = of(name), replace(of(name), track_sharpness=2)
    fit(plain, tmp_path / "plain")
    fit(tracked, tmp_path / "tracked")
    with pytest.raises(Interrupted):
        fit(tracked, tmp_path / "stopped", stop=lambda *now: now == (2, 3))
    torch.manual_seed(99)
    fit(tracked, tmp_path / "stopped")
    assert_same(tmp_path / "tracked", tmp_path / "stopped")
    rows = read_metrics(tmp_path / "tracked")
    assert ["sharpness" in row for row in rows] == [False, True, False, True, False]
    assert all(row.pop("sharpness") > 0 for row in rows[1::2])
    write_metrics(tmp_path / "tracked", rows)
    assert_same(tmp_path / "tracked", tmp_path / "plain")
    ours, theirs = (load_checkpoint(tmp_path / run)[1] for run in ("tracked", "plain"))
    assert torch.equal(ours["random"][0]["cpu"], theirs["random"][0]["cpu"])


def test_fewer_tests_change_nothing_else(tmp_path):
    often = fit(of("mesa"), tmp_path / "often")
    seldom = fit(replace(of("mesa"), evaluate_every=2), tmp_path / "seldom")
    keys = {"accuracy", "teacher_accuracy"}
    rows = read_metrics(tmp_path / "often")
    for row in rows:
        if row["epoch"] not in (1, 3, 4):
            assert row.pop("accuracy") and row.pop("teacher_accuracy")
    write_metrics(tmp_path / "often", rows)
    assert_same(tmp_path / "often", tmp_path / "seldom")
    assert often.accuracy == seldom.accuracy
    assert seldom.best_accuracy == max(row["accuracy"] for row in rows if keys <= row.keys())


def test_the_sharpness_is_that_of_the_epochs_weights(tmp_path):
    run = fit(replace(SMALL, track_sharpness=5), tmp_path)
    opened = open_run(tmp_path)
    expected = sam_sharpness(opened.model, cross_entropy, opened.batches())
    assert read_metrics(tmp_path)[-1]["sharpness"] == run.sharpness == expected


def test_the_loop_is_an_ordinary_loop(tmp_path):
    """The base method against fifteen plain lines."""
    fit(SMALL, tmp_path)
    data = load_data(SMALL.data)
    torch.manual_seed(SMALL.seed)
    model = build_model("small_cnn", num_classes=10, in_channels=1, image_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    loader, step = TrainLoader(data, SMALL.data, SMALL.seed), 0
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for epoch in range(5):
        for batch in loader.batches(epoch):
            if step < 5:
                optimizer.param_groups[0]["lr"] = 0.05 * (step + 1) / 5
            loss = cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step >= 5:
                cosine.step()
            step += 1
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_methods_differ_from_the_base_and_report_what_they_should(tmp_path):
    base = fit(SMALL, tmp_path / "base")
    assert base.teacher_accuracy is None and base.extra_bytes == 0
    for name in METHODS:
        if name == "base":
            continue
        run = fit(of(name), tmp_path / name)
        same = all(
            torch.equal(weights(tmp_path / name)[k], v)
            for k, v in weights(tmp_path / "base").items()
        )
        assert same == (name == "ema"), name
        assert (run.teacher_accuracy is None) == (name not in ("mesa", "ema"))
        assert (run.extra_bytes > 0) == (name in ("mesa", "ema", "saf", "saf_shuffled", "looksam"))
        extra = [row["extra_loss"] for row in read_metrics(tmp_path / name)]
        has_term = name in ("saf", "mesa", "saf_shuffled", "saf_uniform")
        assert extra[:2] == [0.0, 0.0] and (extra[4] > 0) == has_term
        assert run.best_accuracy >= run.accuracy


def test_label_smoothing_is_the_configs(tmp_path):
    fit(of("label_smoothing", smoothing=0.2), tmp_path / "method")
    fit(replace(SMALL, label_smoothing=0.2), tmp_path / "config")
    ours, theirs = weights(tmp_path / "method"), weights(tmp_path / "config")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_parts_of_a_batch_add_up_to_it(tmp_path, monkeypatch):
    def linear(name, *, num_classes, in_channels, image_size, initialization):
        torch.manual_seed(0)
        layers = torch.nn.Flatten(), torch.nn.Linear(in_channels * image_size**2, num_classes)
        return torch.nn.Sequential(*layers)

    monkeypatch.setattr(state_module, "build_model", linear)
    for name in ("base", "saf", "sam"):
        whole = replace(of(name), epochs=4)
        parts = replace(whole, optimizer=replace(whole.optimizer, accumulate=4))
        fit(whole, tmp_path / f"{name} whole")
        fit(parts, tmp_path / f"{name} parts")
        for key, tensor in weights(tmp_path / f"{name} whole").items():
            other = weights(tmp_path / f"{name} parts")[key]
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)
        for mine, his in zip(
            read_metrics(tmp_path / f"{name} whole"),
            read_metrics(tmp_path / f"{name} parts"),
            strict=True,
        ):
            assert mine["loss"] == pytest.approx(his["loss"], rel=1e-4)
            assert mine["extra_loss"] == pytest.approx(his["extra_loss"], rel=1e-3, abs=1e-6)


def test_a_mixed_batch_leaves_the_memory_alone(tmp_path):
    config = of("saf")
    config = replace(config, data=replace(config.data, mixup=0.4))
    with pytest.raises(Interrupted):
        fit(config, tmp_path, stop=lambda epoch, step: (epoch, step) == (1, 5))
    stamps = load_checkpoint(tmp_path)[1]["training"]["method"]["memory.stamps"]
    loader = TrainLoader(load_data(config.data), config.data, config.seed)
    for epoch in (0, 1):
        clean = {i for b in loader.batches(epoch) if b.mixed is None for i in b.index.tolist()}
        assert 0 < len(clean) < 160 or epoch
        assert set((stamps == epoch).any(0).nonzero().flatten().tolist()) >= (
            clean if epoch == 1 else set()
        )
    assert (stamps == 1).sum() == len(clean)


def test_options_of_the_step(tmp_path, monkeypatch):
    clipped = replace(SMALL, optimizer=replace(SMALL.optimizer, clip_norm=1e-6, weight_decay=0.0))
    fit(clipped, tmp_path / "clipped")
    torch.manual_seed(SMALL.seed)
    start = build_model("small_cnn", num_classes=10, in_channels=1, image_size=8)
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(
            weights(tmp_path / "clipped")[name], parameter.detach(), rtol=0, atol=1e-4
        )
    fit(SMALL, tmp_path / "full")
    fit(replace(SMALL, precision="bf16", channels_last=True), tmp_path / "bf16")
    full, half = (read_metrics(tmp_path / name)[0]["loss"] for name in ("full", "bf16"))
    assert full != half
    assert half == pytest.approx(full, rel=0.02)
    called = []
    monkeypatch.setattr(torch, "compile", lambda model: called.append(1) or model)
    fit(replace(SMALL, compile=True, epochs=2), tmp_path / "compiled")
    assert called


def test_adamw_and_weight_decay_of_matrices_alone(tmp_path):
    config = replace(
        SMALL, optimizer=OptimizerConfig("adamw", lr=1e-3, weight_decay=0.3, decay_vectors=False)
    )
    fit(config, tmp_path)
    groups = load_checkpoint(tmp_path)[1]["training"]["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_a_run_of_before_there_was_an_option_is_still_the_same(tmp_path):
    written = json.loads(json.dumps(asdict(SMALL)))
    del written["evaluate_every"], written["data"]["holdout"], written["optimizer"]["nesterov"]
    (tmp_path / folder.CONFIG).write_text(json.dumps(written))
    folder.check_folder(tmp_path, SMALL)
    with pytest.raises(ValueError, match="another config"):
        folder.check_folder(tmp_path, replace(SMALL, data=replace(SMALL.data, holdout=5)))


def test_the_config_is_beside_the_run_and_another_is_refused(tmp_path):
    config = of("saf")
    fit(config, tmp_path)
    assert folder.read_config(tmp_path) == config
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        json.dumps(asdict(config))
    )
    with pytest.raises(ValueError, match=r"holds a run of another config \(seed is 0 there\)"):
        fit(replace(config, seed=1), tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="has lost figures of its 5 epochs"):
        fit(config, tmp_path)
    (tmp_path / "config.json").write_text('{"data": ')
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        folder.read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"data": {}}')
    with pytest.raises(ValueError, match=r"config.json is not a run's config"):
        folder.read_config(tmp_path)


def test_changed_data_are_noticed(tmp_path):
    arrays = {"x_train": np.arange(64 * 64, dtype="uint8").reshape(64, 8, 8)}
    arrays |= {
        "y_train": np.arange(64) % 2,
        "x_test": arrays["x_train"],
        "y_test": np.arange(64) % 2,
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    config = replace(SMALL, data=DataConfig(str(tmp_path / "mine.npz"), batch_size=32))
    with pytest.raises(Interrupted):
        fit(config, tmp_path / "run", stop=lambda *now: now == (2, 1))
    np.savez(tmp_path / "mine.npz", **{**arrays, "x_train": arrays["x_train"][::-1]})
    with pytest.raises(ValueError, match="have changed since it was saved"):
        fit(config, tmp_path / "run")


def test_a_run_that_diverges_says_so(tmp_path):
    run = fit(replace(SMALL, optimizer=OptimizerConfig(lr=1e9)), tmp_path)
    assert run.diverged
    assert read_metrics(tmp_path)[-1]["loss"] is None


def test_mesas_teacher_sees_mixed_images_and_half_precision(tmp_path, monkeypatch):
    kinds, linear = [], torch.nn.Linear.forward

    def noted(self, x):
        out = linear(self, x)
        kinds.append((self.training, out.dtype))
        return out

    monkeypatch.setattr(torch.nn.Linear, "forward", noted)
    config = replace(of("mesa"), precision="bf16", epochs=4)
    fit(replace(config, data=replace(config.data, cutmix=1.0)), tmp_path)
    assert kinds.count((True, torch.bfloat16)) == 4 * 5
    of_the_teacher = 1 + 2 * 5  # on the first batch, and from epoch 2 on, mixed or not
    evaluations = 4 * 2 * math.ceil((1797 - 160) / 256)
    assert kinds.count((False, torch.bfloat16)) == of_the_teacher + evaluations
    assert read_metrics(tmp_path)[3]["extra_loss"] > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(of("saf"), epochs=1), "compares with 1 epochs ago, and the run has 1"),
        (replace(SMALL, data=replace(SMALL.data, batch_size=161)), "batch"),
        (replace(of("mesa"), epochs=2), "mesa starts in epoch 2, and the run has 2"),
        (
            replace(of("mesa"), method=MethodConfig("mesa", {"start_epoch": 1, "freeze_epoch": 5})),
            "mesa freezes its teacher in epoch 5, and the run has 5",
        ),
        (
            replace(
                of("mesa"), method=MethodConfig("mesa", {"start_epoch": 1, "freeze_epoch": "half"})
            ),
            "freeze_epoch must be .*, got 'half'",
        ),
        (replace(SMALL, optimizer=OptimizerConfig(warmup_epochs=9)), "leaves nothing of 5"),
        (replace(SMALL, method=MethodConfig("safe")), "did you mean 'saf'"),
        (
            replace(of("esam"), optimizer=OptimizerConfig(clip_norm=1.0)),
            "takes neither accumulate nor clip_norm",
        ),
        (replace(SMALL, model="small_cn"), "did you mean 'small_cnn'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def command(run, epochs=14):
    settings = ["--data.train_size=320", "--data.batch_size=32", f"--epochs={epochs}"]
    method = ["--method.name=saf", "--method.settings.start_epoch=3"]
    return [sys.executable, "-m", "saltflat", "train", *settings, *method, f"--out={run}"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_or_interrupted(number, tmp_path):
    """kill -9 at any moment and Ctrl-C: the same weights in the end, bit for bit."""
    run = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(run), stdout=subprocess.PIPE, text=True, env=environment)
    while len(read_metrics(run)) < 4:
        time.sleep(0.02)
        assert process.poll() is None
    time.sleep(0.1)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert not (run / folder.RESULT).exists()
    resume = [sys.executable, "-m", "saltflat", "train", "--resume", str(run)]
    if number == signal.SIGINT:
        assert said == f"stopped and saved; go on with: saltflat train --resume {run}\n"
    result = subprocess.run(resume, capture_output=True, text=True, env=environment)
    assert "% after the last epoch" in result.stdout, result.stderr
    straight = tmp_path / "straight"
    subprocess.run(command(straight), check=True, capture_output=True, env=environment)
    assert_same(run, straight)
