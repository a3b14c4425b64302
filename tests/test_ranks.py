"""The runner on several processes: real ones, that talk by gloo on the CPU."""

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fit_on_ranks import Job, smooth
from torch.utils._pytree import tree_leaves

from saltflat.train import Config, DataConfig, Interrupted, MethodConfig, OptimizerConfig, fit
from saltflat.train import state as state_module
from saltflat.train.bench import bench
from saltflat.train.checkpoint import (
    MANIFEST,
    STATE,
    WEIGHTS,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
)
from saltflat.train.compare import compare
from saltflat.train.folder import RESULT
from saltflat.train.log import read_metrics
from saltflat.train.methods import METHODS

SMALL = Config(
    data=DataConfig(train_size=150, batch_size=36, augment="basic", label_noise=0.1),
    model="smooth",
    optimizer=OptimizerConfig(lr=0.1),
    epochs=2,
    checkpoint_every=2,
    timeout=60,
)
EARLY = {"lag": 1, "start_epoch": 1}


def of(name, base=SMALL, **settings):
    known = METHODS[name].settings()
    early = {key: value for key, value in EARLY.items() if key in known}
    return replace(base, method=MethodConfig(name, {**early, **settings}))


def optimizing(config, **changes):
    return replace(config, optimizer=replace(config.optimizer, **changes))


def run(size, folder, jobs, seconds=120):
    """Let processes do the jobs; what each rank said of each."""
    folder.mkdir()
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    script = Path(__file__).with_name("fit_on_ranks.py")
    command = [sys.executable, str(script), str(size), str(folder), str(seconds)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    files = [folder / f"said.{rank}" for rank in range(size)]
    said = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    assert said, result.stderr
    return said


def assert_alike(run, other, **tolerance):
    """The same weights, state of training and figures, to the last bit unless a tolerance is."""
    states = []
    for folder in (run, other):
        weights, state = load_checkpoint(folder)
        leaves = tree_leaves([weights, state["training"]])
        states.append([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    torch.testing.assert_close(*states, **{"rtol": 0, "atol": 0, **tolerance}, equal_nan=True)
    assert len(states[0]) > 10
    for mine, his in zip(read_metrics(run), read_metrics(other), strict=True):
        mine, his = ({**figures, "seconds": 0} for figures in (mine, his))
        assert mine == (pytest.approx(his, rel=1e-3, abs=0.1) if tolerance else his)


CLOSE = {"rtol": 1e-3, "atol": 1e-4}
CASES = {
    **{name: of(name) for name in METHODS if name != "esam"},
    "saf in parts": optimizing(of("saf"), accumulate=3),
    "sam in parts, clipped": optimizing(of("sam"), accumulate=2, clip_norm=0.5),
    "adamw": optimizing(of("mesa"), name="adamw", lr=1e-3),
    "mixed": replace(of("saf"), data=replace(SMALL.data, mixup=0.4, cutmix=1.0)),
}
FEWER = ("saf", "mesa", "sam", "saf in parts", "mixed")


# Each of these yields how many processes it wants and what they are to do, and is told how each job
# ended. So all of them together start processes twice, which takes longer than the runs.


def together_as_one(size, tmp):
    cases = {name: one for name, one in CASES.items() if size == 2 or name in FEWER}
    jobs = [Job(config, tmp / f"{name}, together") for name, config in cases.items()]
    assert (yield size, jobs) == ["done"] * len(jobs)
    for job, (name, config) in zip(jobs, cases.items(), strict=True):
        fit(config, tmp / name)
        assert_alike(job.folder, tmp / name, **CLOSE)


def another_number_of_processes(config, tmp):
    """From 2 to 3 to 1, and from 1 to 2, as one process that was not stopped."""
    shrinking, growing, torn = tmp / "2, 3, 1", tmp / "1, 2", tmp / "torn"
    with pytest.raises(Interrupted):
        fit(config, growing, stop=lambda *now: now == (1, 2))
    two = [Job(config, shrinking, stop=(0, 2)), Job(config, growing)]
    assert (yield 2, two) == ["stopped", "done"]
    part = list_checkpoints(shutil.copytree(shrinking, torn))[0] / WEIGHTS
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"damaged .*{part.name} is not what was written"):
        load_checkpoint(torn)
    resumed, refused = yield 3, [Job(config, shrinking, stop=(1, 1)), Job(config, torn)]
    assert resumed == "stopped"
    assert f"{part.name} is not what was written" in refused
    steps = [path.name for path in list_checkpoints(shrinking)]
    assert steps == ["000000006", "000000003"]
    for path in (shrinking, tmp / "straight"):
        fit(config, path)
    for path in (shrinking, growing):
        assert_alike(path, tmp / "straight", **CLOSE)


def stopped_and_not(config, tmp):
    """Bit for bit."""
    straight, broken = tmp / "straight", tmp / "broken"
    jobs = [Job(config, straight), Job(config, broken, stop=(1, 1)), Job(config, broken)]
    assert (yield 2, jobs) == ["done", "stopped", "done"]
    assert_alike(straight, broken)


def one_was_interrupted(number, tmp):
    """All save the same step: the signal is noticed after the next, and known after one more."""
    assert (yield 2, [Job(SMALL, tmp / "run", (1, 1), signal=number)]) == ["stopped"]
    assert [path.name for path in list_checkpoints(tmp / "run")] == ["000000007"]
    assert not (tmp / "run" / RESULT).exists()


def one_writes(_, tmp):
    """One config, one log, one result, one set of checkpoints."""
    config = replace(of("saf"), log=("tensorboard",), checkpoint_every=1)
    assert (yield 2, [Job(config, tmp / "run")]) == ["done"]
    files = {str(p.relative_to(tmp / "run")) for p in (tmp / "run").rglob("*") if p.is_file()}
    inside = (WEIGHTS, STATE, MANIFEST)
    kept = {f"checkpoints/{step:09d}/{name}" for step in (4, 8) for name in inside}
    events = {name for name in files if name.startswith("tensorboard/")}
    assert len(events) == 1
    assert files - events == kept | {"config.json", "metrics.jsonl", RESULT}
    assert [row["epoch"] for row in read_metrics(tmp / "run")] == [0, 1]


def refused(case, tmp):
    """Before anything is written, on every process."""
    config, differs, message = case
    (said,) = yield 2, [Job(config, tmp / "run", differs=differs)]
    assert re.search(f"^ValueError: .*{message}", said), said
    assert not (tmp / "run").exists()


OTHER_LR = {"optimizer": replace(SMALL.optimizer, lr=0.2)}
OTHER_RHO = {"method": MethodConfig("sam", {"rho": 0.1})}
ODD = replace(SMALL, data=replace(SMALL.data, batch_size=37))
SCENARIOS = [
    *((together_as_one, size) for size in (2, 3)),
    (another_number_of_processes, of("saf")),
    (another_number_of_processes, of("looksam", interval=2)),
    (another_number_of_processes, of("mesa")),
    (stopped_and_not, replace(of("saf"), model="dropout")),
    (stopped_and_not, replace(of("mesa"), model="small_cnn")),
    (stopped_and_not, replace(of("sam"), model="dropout")),
    *((one_was_interrupted, number) for number in (signal.SIGINT, signal.SIGTERM)),
    (one_writes, None),
    *(
        (refused, case)
        for case in [
            (SMALL, OTHER_LR, r"disagree on optimizer.lr \(0.1 on rank 0, 0.2 on rank 1\)"),
            (of("sam"), OTHER_RHO, r"on method.settings.rho \(None on rank 0, 0.1 on rank 1\)"),
            (ODD, {}, "batch_size 37 is of all processes together, and must be a multiple of 2"),
            (optimizing(SMALL, accumulate=4), {}, "of 2 processes times accumulate 4"),
            (of("esam"), {}, "esam chooses among the rows of a whole batch"),
            (replace(SMALL, sync_batchnorm=True), {}, "sync_batchnorm is for GPUs"),
        ]
    ),
]


def test_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "build_model", smooth)
    waiting = []
    for number, (scenario, what) in enumerate(SCENARIOS):
        (tmp_path / str(number)).mkdir()
        one = scenario(what, tmp_path / str(number))
        waiting.append((one, *next(one)))
    for size in (2, 3):
        mine = [(one, jobs) for one, wanted, jobs in waiting if wanted == size]
        waiting = [one for one in waiting if one[1] != size]
        said = run(size, tmp_path / f"on {size}", [job for _, jobs in mine for job in jobs])
        assert [len(ends) for ends in said] == [sum(len(jobs) for _, jobs in mine)] * size, said
        ends = iter(zip(*said, strict=True))
        for one, jobs in mine:
            told = [next(ends) for _ in jobs]
            assert all(len(set(ranks)) == 1 for ranks in told), told
            with contextlib.suppress(StopIteration):
                waiting.append((one, *one.send([ranks[0] for ranks in told])))
    assert waiting == []


def test_the_others_do_not_wait_for_ever(tmp_path):
    job = Job(replace(SMALL, timeout=15), tmp_path / "run", (1, 1), signal=signal.SIGSTOP)
    ((said,),) = run(2, tmp_path / "ranks", [job], seconds=15)
    assert said.startswith("RuntimeError: rank 0 of 2 lost another process, which has stopped or")
    assert "not heard of for timeout=15 seconds" in said


def test_only_train_takes_several_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="compare takes one process, and torchrun started 2"):
        compare(SMALL, [MethodConfig("base")], tmp_path)
    with pytest.raises(ValueError, match="bench takes one process"):
        bench({"base": SMALL}, rounds=1, steps=1)


TORCHRUN = Config(
    data=DataConfig(train_size=160, batch_size=32),
    method=MethodConfig("saf", {"start_epoch": 3}),
    epochs=8,
)


def torchrun(folder):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = ["--data.train_size=160", "--data.batch_size=32", "--epochs=8"]
    method = ["--method.name=saf", "--method.settings.start_epoch=3", f"--out={folder}"]
    return [*launch, "--max-restarts=1", "-m", "saltflat", "train", *settings, *method]


def children(pid):
    """The processes that one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_torchrun_starts_killed_processes_again(tmp_path):
    """A rank that is killed in the middle of an epoch: the same weights in the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen(torchrun(tmp_path / "killed"), env=environment, **pipes)
    while len(read_metrics(tmp_path / "killed")) < 4:
        time.sleep(0.02)
        assert killed.poll() is None, killed.communicate()
    os.kill(children(killed.pid)[1], signal.SIGKILL)
    out, err = killed.communicate()
    assert killed.returncode == 0, err
    assert out.count("% after the last epoch") == 1
    assert run(2, tmp_path / "ranks", [Job(TORCHRUN, tmp_path / "straight")]) == [["done"]] * 2
    assert_alike(tmp_path / "killed", tmp_path / "straight")
