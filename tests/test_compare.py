import json
import os
from dataclasses import replace

import pytest

from saltflat.core.statistics import Interval
from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig, compare
from saltflat.train.compare import Row, describe, table, verdicts
from saltflat.train.compare import compare as run

SMALL = Config(
    data=DataConfig(train_size=128, batch_size=32),
    optimizer=OptimizerConfig(lr=0.05),
    epochs=3,
)
SEEDS = ("seed0", "seed1")
METHODS = [MethodConfig("base"), MethodConfig("saf", {"lag": 1, "start_epoch": 1})]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_comparison_and_its_files(jobs, tmp_path):
    said = []
    rows = run(SMALL, METHODS, tmp_path, seeds=2, jobs=jobs, say=said.append)
    assert [row.method for row in rows] == ["base", "saf"]
    base, saf = rows
    assert base.speed == 1.0 and base.difference is None and base.extra_bytes == 0
    assert saf.extra_bytes > 0 and saf.difference.n == 2
    found = {
        name: [
            json.loads((tmp_path / name / f"seed{s}" / "result.json").read_text()) for s in (0, 1)
        ]
        for name in ("base", "saf")
    }
    differences = [
        ours["accuracy"] - theirs["accuracy"]
        for ours, theirs in zip(found["saf"], found["base"], strict=True)
    ]
    assert saf.difference.mean == pytest.approx(sum(differences) / 2)
    assert found["base"][0]["accuracy"] != found["base"][1]["accuracy"]
    assert len(said) == 4
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["method"] for row in summary["rows"]] == ["base", "saf"]
    assert summary["verdicts"] == verdicts(rows)
    cores = os.cpu_count()
    assert f", {max(1, cores // jobs)} of {cores} threads" in json.dumps(summary)
    text = (tmp_path / "table.md").read_text()
    assert "| base |" in text and verdicts(rows)[0] in text and describe(SMALL) in text


def test_it_goes_on_where_it_stopped(tmp_path):
    first = run(SMALL, METHODS, tmp_path, seeds=2, say=lambda line: None)
    (tmp_path / "saf" / "seed1" / "result.json").unlink()
    said = []
    second = run(SMALL, METHODS, tmp_path, seeds=2, say=said.append)
    assert said[0] == "3 of 4 runs were complete already"
    assert len(said) == 2
    assert first == second


def test_another_config_in_the_same_folder_is_refused(tmp_path):
    run(SMALL, METHODS, tmp_path, seeds=1, say=lambda line: None)
    with pytest.raises(ValueError, match="holds a run of another config"):
        run(replace(SMALL, epochs=4), METHODS, tmp_path, seeds=1, say=lambda line: None)


def test_seeds_begin_with_the_configs_and_ema_is_judged_by_its_average(tmp_path):
    methods = [MethodConfig("sam"), MethodConfig("ema", {"decay": 0.5})]
    rows = run(replace(SMALL, seed=7), methods, tmp_path, seeds=2, say=lambda line: None)
    assert sorted(path.name for path in (tmp_path / "ema").iterdir()) == ["seed7", "seed8"]
    assert rows[1].accuracy.mean == pytest.approx(rows[1].teacher)
    assert verdicts(rows)[0].startswith("ema: ") and " sam (" in verdicts(rows)[0]


def test_the_same_budget_of_time(tmp_path, monkeypatch):
    speeds = {
        name: {"images_per_second": 1e3 * ratio, "ratio": ratio}
        for name, ratio in {"base": 1.0, "sam": 0.5}.items()
    }
    monkeypatch.setattr(compare, "_speeds", lambda folder, configs: speeds)
    methods = [MethodConfig("base"), MethodConfig("sam")]
    config = replace(SMALL, epochs=4)
    rows = run(config, methods, tmp_path, seeds=1, budget="time", say=lambda line: None)
    assert [row.epochs for row in rows] == [4, 2]


@pytest.mark.parametrize(
    ("methods", "kwargs"),
    [([], {}), (METHODS + METHODS[:1], {}), (METHODS, {"seeds": 0}), (METHODS, {"jobs": 0})],
)
def test_bad_comparisons(methods, kwargs, tmp_path):
    with pytest.raises(ValueError, match="methods must be different ones"):
        run(SMALL, methods, tmp_path / "new", **kwargs)
    assert not (tmp_path / "new").exists()


def test_the_table():
    near = Interval(92.0, 91.0, 93.0, 3)
    rows = [
        Row("base", near, 92.5, None, None, 1e4, 1.0, 0, 0.01, 40),
        Row("mesa", near, 93.0, 92.1, Interval(0.5, 0.1, 0.9, 3), 8e3, 0.8, 2**20, 0.02, 40),
        Row("sam", near, 93.0, None, Interval(-0.5, -0.9, -0.1, 3), 5e3, 0.5, 0, 0.02, 40),
    ]
    header, _, mesa, _ = table(rows)
    assert dict(zip(header, mesa, strict=True))["kept memory"] == "1.00 MiB"
    assert "better than base" in verdicts(rows)[0] and "worse than base" in verdicts(rows)[1]
