"""docs/results*.md say what benchmarks/results/accuracy holds, which is of the named recipes."""

import ast
import dataclasses
import json
import re
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from saltflat.core.statistics import interval, paired
from saltflat.train.config import Config, DataConfig, MethodConfig
from saltflat.train.files import to_json
from saltflat.train.folder import read_config
from saltflat.train.log import read_metrics
from saltflat.train.loop import Interrupted, fit
from saltflat.train.methods import METHODS
from saltflat.train.provenance import train_command

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import accuracy  # noqa: E402
from lines import GONE, renamed  # noqa: E402
from studies import STUDIES  # noqa: E402

LINES = {line for study in STUDIES.values() for line in study.lines}
KEPT = {path.stem: json.loads(path.read_text()) for path in accuracy.KEPT.glob("*.json")}


def test_the_pages_have_every_table_as_the_results_make_it():
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("results*.md")))
    expected = [text for study in STUDIES.values() if (text := accuracy.table(study))]
    found = [text.strip() for text in re.findall(r"(?:^\|.*\n)+", pages, flags=re.MULTILINE)]
    assert sorted(text for text in found if text.startswith("| run |")) == sorted(expected)
    parts = [path.read_text() for path in accuracy.RESULTS.glob("mesa_parts_*.md")]
    settings = [text for text in found if text.startswith("| setting |")]
    assert len(settings) == len(parts) > 0
    assert all(any(text in part for part in parts) for text in settings)


NAMED = re.compile(r"recipes/(\w+)|`(.+?)`")
"""The recipe of a row of the README, and what differs from it."""


def test_the_readmes_accuracies_are_the_results():
    readme = (ROOT / "README.md").read_text()
    rows = {
        " ".join("".join(part) for part in NAMED.findall(cells[0])): cells[1:]
        for line in readme.partition("## Accuracy")[2].partition("\n## ")[0].splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
        and "recipes/" in cells[0]
    }
    table = [line.strip("|").split("|") for line in accuracy.table(STUDIES["table"]).splitlines()]
    measured = {cells[0].strip(" `"): [cell.strip() for cell in cells] for cells in table[2:]}
    assert rows == {
        row: [*cells[1:4], cells[7]] for row, cells in measured.items() if " method=" not in row
    }


def test_the_readmes_other_accuracies_are_the_first_of_each_method_in_their_studies():
    readme = (ROOT / "README.md").read_text().partition("## Accuracy")[2].partition("\n## ")[0]
    heads, rows, papers = ["base", "sam", "saf", "mesa"], {}, {}
    for line in readme.partition("| | SGD |")[2].splitlines():
        title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name := re.search(r"\(`(\w+)`\)$", title):
            study = name[1]
            rows[study] = {head: cell for head, cell in zip(heads, cells, strict=True) if cell}
        elif title == "in the paper":
            papers |= {(study, head): cell for head, cell in zip(heads, cells, strict=True)}
    assert rows.keys() == {"cifar10", "wrn", "decayed"}
    for study, cells in rows.items():
        first = {}
        for line in STUDIES[study].lines:
            if accuracy.judged(line):
                first.setdefault(accuracy.config_of(line, 0).method.name, line)
        assert cells.keys() == first.keys()
        for method, line in first.items():
            assert accuracy.results(line).keys() == {0}
            assert cells[method].partition(",")[0] == f"{accuracy.judged(line)[0]:.2f}"
    for (study, method), figure in papers.items():
        base = STUDIES[study].lines[0].removesuffix("base")
        assert figure == accuracy.paper_figure(base + method)


INTERVAL = re.compile(r"(-?\d+\.\d\d)(?: points)? (\[-?\d+\.\d\d, -?\d+\.\d\d\])")


def test_every_interval_that_is_written_is_a_row_or_one_row_less_another():
    """With or without the first seed, which chose some rows; or printed by another command."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path.name: " ".join(path.read_text().split()) for path in pages}
    printed = [path.read_text() for path in accuracy.RESULTS.glob("*.md")]
    printed.append((ROOT / "README.md").read_text().partition("\nmethod  accuracy")[2])
    for text in texts.values():
        for lists in re.findall(r"\bpaired\((\[.*?\], \[.*?\])\)`", text):
            printed.append(str(paired(*ast.literal_eval(lists))))
    known = {found for text in printed for found in INTERVAL.findall(text)}
    asked = {found for text in texts.values() for found in INTERVAL.findall(text)} - known
    means = {float(mean) for mean, _ in asked}

    rows = {}
    for line in LINES:
        for figure in ("accuracy", *accuracy.FIGURES.values()):
            if found := accuracy.judged(line, figure=figure):
                alike = rows.setdefault((line.partition("_")[0], figure), set())
                alike.add(tuple(sorted(found.items())))
    for some in rows.values():
        for ours, theirs in product(map(dict, some), [{}, *map(dict, some)]):
            common = sorted(ours.keys() & (theirs or ours).keys())
            for seeds in (common, common[1:]):
                values = [ours[seed] - theirs.get(seed, 0.0) for seed in seeds]
                if len(values) > 1 and round(fmean(values), 2) in means:
                    known |= set(INTERVAL.findall(str(interval(values))))
    assert asked - known == set()


def test_everything_that_was_kept_is_of_a_study():
    assert KEPT.keys() <= {accuracy.folder_of(line) for line in LINES}


@pytest.mark.parametrize("line", sorted(line for line in LINES if GONE & set(line.split())))
def test_a_row_that_only_version_0_1_can_train_says_so(line):
    with pytest.raises(ValueError, match="is gone"):
        accuracy.config_of(line, 0)


@pytest.mark.parametrize(
    "line",
    sorted(
        line for line in LINES if accuracy.folder_of(line) in KEPT and not GONE & set(line.split())
    ),
)
def test_a_kept_run_is_the_recipe_with_its_changes(line):
    """But for where it was made: precision and layout on a GPU, the name of the data's file."""
    free = {"precision", "channels_last", "compile", "device"}
    named = {option.split("=")[0] for option in line.split()[1:]}
    for seed, run in KEPT[accuracy.folder_of(line)].items():
        meant = accuracy.config_of(line, int(seed.removeprefix("seed")))
        ours = json.loads(to_json(dataclasses.asdict(accuracy.in_full(meant))))
        theirs = {**ours, **run["config"], "data": {**ours["data"], **run["config"]["data"]}}
        method = theirs["method"]
        theirs["method"] = {**method, "settings": renamed(method["name"], method["settings"])}
        theirs["data"]["name"] = theirs["data"]["name"].removesuffix(".npz")
        for name in free - named:
            theirs[name] = ours[name]
        assert theirs == ours
        assert run["metrics"][-1]["epoch"] == meant.epochs - 1
        assert run["metrics"][-1]["accuracy"] == pytest.approx(run["result"]["accuracy"])


def test_options_of_a_run():
    line = "cifar100_resnet18_saf data.cutout=16 epochs=7 method.storage=uint8"
    config = accuracy.config_of(line, 3, "mine.npz")
    assert config.data == DataConfig("mine.npz", augment="basic", batch_size=128, cutout=16)
    assert config.method == MethodConfig("saf", {"storage": "uint8"})
    assert (config.seed, config.epochs, config.checkpoint_every) == (3, 7, 7)
    tests = {50: 1, 60: 5, 200: 5, 400: 10}
    for epochs, every in tests.items():
        assert (
            accuracy.config_of(f"cifar100_resnet18_saf epochs={epochs}", 0).evaluate_every == every
        )
    other = accuracy.config_of("cifar100_resnet18_saf method=ema method.decay=0.9", 0)
    switches = {"warmup": True, "average_std": True}  # the defaults of version 0.1
    assert other.method == MethodConfig("ema", {**switches, "decay": 0.9})


def test_a_number_may_be_written_as_people_do():
    config = accuracy.config_of("cifar100_resnet18_base optimizer.weight_decay=1e-3", 0)
    assert config.optimizer.weight_decay == 1e-3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tabel", "did you mean 'table'"),
        ("cifar100_resnet18_bass", "did you mean 'cifar100_resnet18_base'"),
        ("digits_noisy epochs", "'epochs' is not name=value"),
        ("digits_noisy epochs=", "'epochs=' is not name=value"),
        ("digits_noisy epochs=six", "epochs must be of the type int"),
        ("digits_noisy data.cutot=3", "did you mean 'data.cutout'"),
        ("digits_noisy methd=saf", "did you mean 'method'"),
        ("digits_noisy method=safe", "did you mean 'saf'"),
        ("digits_noisy method=saf method.wieght=3", "did you mean 'weight'"),
        ("digits_noisy seed=4", "no option 'seed'"),
        ("digits_noisy method.weight=3.0 method=saf", "must stand after method=saf"),
        ("table epochs=3", "table is a study"),
        ("", "no study or recipe ''"),
        ("digits_noisy method=null", "method must be of the type str"),
        ("digits_noisy epochs=[", "'[' is no value"),
        ("digits_noisy data.root=/tmp/x", "runs' folders have the names of their options"),
        ("digits_noisy epochs=6 epochs=7", "epochs is said twice"),
        ("digits_noisy data.train_size=1e3", "train_size must be of the type int"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        accuracy.config_of(line, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "digits_noisy epochs=4", "digits_noisy epochs=4 method=saf"],
            "starts in epoch 5",
        ),
        (["train", "digits_noisy", "--jobs", "0"], "at least 1 run at once"),
        (["train", "digits_noisy", "--seeds", "0"], "--seeds must be at least 1"),
        (["train", "digits_noisy", "--first", "-1"], "--first must be 0 or more"),
        (
            ["train", "digits_noisy", "--data", "x.npz"],
            "x.npz is for runs of CIFAR, and not of digits",
        ),
        (["train", "cifar10", "--data", "x.npz"], "x.npz"),
        (["train", "cifar10", "--data", "x.npy"], "x.npy is no .npz"),
        (["train", "cifar10", "gap", "--data", "x.npz"], "cannot be cifar10 and cifar100"),
        (["keep", "nowhere"], "no complete run in nowhere"),
        (["unpack", "there", "--kept", "nowhere"], "nothing is kept in nowhere"),
        (["tables", "--kept", "nowhere"], "nothing in nowhere makes a table"),
        (["less", "digits_noisy foo", "digits_noisy"], "'foo' is not name=value"),
        (["less", "cifar10_resnet18_base", "cifar100_resnet18_base"], "different data"),
        (["less", "digits_noisy", "digits_noisy method=saf"], "nothing is kept of 'digits_noisy'"),
    ],
)
def test_a_command_that_cannot_be_meant_says_so_and_does_nothing(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        accuracy.main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_named_twice_is_trained_once(monkeypatch):
    asked = []
    monkeypatch.setattr(accuracy, "fit_together", lambda runs, *_: asked.extend(runs))
    accuracy.main(["train", "cifar10", "cifar10_resnet18_saf ", "cifar10", "--seeds", "2"])
    folders = [str(folder) for _, folder in asked]
    assert len(folders) == len(set(folders)) == 10


def test_runs_are_kept_and_unpacked(tmp_path, capsys):
    data = DataConfig(train_size=64, batch_size=32)
    small = Config(data, method=MethodConfig("saf", {"start_epoch": 4}), epochs=6)
    for seed in (0, 1):
        config = dataclasses.replace(small, seed=seed)
        fit(config, tmp_path / "runs" / "digits_noisy-method_saf" / f"seed{seed}")
    kept = tmp_path / "kept"
    for command in (["keep", tmp_path / "runs", "--out", kept], ["unpack", tmp_path / "back"]):
        words = [str(word) for word in command] + ["--kept", str(kept)] * (command[0] == "unpack")
        accuracy.main(words)
    back = tmp_path / "back" / "digits_noisy-method_saf" / "seed1"
    again = read_config(back)
    assert again == dataclasses.replace(small, seed=1, method=again.method)
    assert again.method.settings == {**METHODS["saf"].settings(), "start_epoch": 4}
    assert [row["epoch"] for row in read_metrics(back)] == [4, 5]
    result = json.loads((back / "result.json").read_text())
    assert result["images_per_second"] is None  # several may have shared the machine
    command = result["command"]
    assert command == train_command(again)  # with settings that were the defaults
    assert '"lag": 3' in command
    runs = accuracy.judged("digits_noisy method=saf", kept)
    assert list(runs) == [0, 1]
    assert str(tmp_path) not in (kept / "digits_noisy-method_saf.json").read_text()
    capsys.readouterr()
    again = tmp_path / "runs" / "digits_noisy-method_saf" / "seed1" / "result.json"
    again.write_text(again.read_text().replace('"accuracy": ', '"accuracy": 1'))
    accuracy.main(["keep", str(tmp_path / "runs"), "--out", str(kept)])
    assert capsys.readouterr().out.endswith(": 0 more, 2 in all\n")
    assert accuracy.judged("digits_noisy method=saf", kept) == runs  # what is kept stays
    accuracy.main(["tables", "--kept", str(kept)])
    said = capsys.readouterr().out
    assert f"| `digits_noisy method=saf` | 0 1 | {sum(runs.values()) / 2:.2f} [" in said


@pytest.mark.parametrize("classes", [10, 100])
def test_the_data_of_a_recipe_have_its_classes(classes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "fit_together", lambda *_: None)
    images, labels = np.zeros((classes, 4, 4, 3), np.uint8), np.arange(classes)
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "some.npz", **arrays)
    words = ["train", "cifar100_resnet18_base", "--data", str(tmp_path / "some.npz")]
    if classes == 100:
        accuracy.main(words)
        return
    with pytest.raises(SystemExit):
        accuracy.main(words)
    assert "has 10 classes, and is not cifar100" in capsys.readouterr().err


def test_a_run_of_another_config_is_not_taken_for_a_rows(tmp_path):
    small = Config(DataConfig(train_size=64, batch_size=32), epochs=2)
    fit(small, tmp_path / "digits_noisy-method_saf" / "seed0")
    with pytest.raises(SystemExit) as end:
        words = ["train", "digits_noisy method=saf", "--seeds", "1", "--out", str(tmp_path)]
        accuracy.main(words)
    assert end.value.code == 2


def test_a_stopped_command_says_how_to_go_on(monkeypatch, capsys):
    def stopped(*_):
        raise Interrupted

    monkeypatch.setattr(accuracy, "fit_together", stopped)
    with pytest.raises(SystemExit) as end:
        accuracy.main(["train", "digits_noisy"])
    assert end.value.code == 130
    assert "the same command goes on" in capsys.readouterr().out


def test_one_row_less_another(tmp_path, capsys):
    def write(line, teacher=None, **accuracies):
        runs = {
            seed: {
                "result": {
                    "accuracy": value,
                    "best_accuracy": 2 * value,
                    "teacher_accuracy": teacher and value + teacher,
                }
            }
            for seed, value in accuracies.items()
        }
        (tmp_path / f"{accuracy.folder_of(line)}.json").write_text(json.dumps(runs))

    write("digits_noisy method=saf", seed0=91.0, seed1=93.0, seed4=99.0)
    write("digits_noisy method=sam", seed0=90.0, seed1=91.0, seed3=10.0)
    write("digits_noisy method=base", seed3=50.0)
    write("digits_noisy method=mesa", teacher=0.25, seed0=93.0, seed1=95.0)
    for one, other, flags, said in [
        ("saf", "sam", [], "1.50 [-4.85, 7.85], n = 2"),  # 12.706 * sqrt(0.5) / sqrt(2) either side
        ("saf", "base", [], "no seed of both"),
        ("mesa", "saf", [], "2.00 [2.00, 2.00], n = 2"),
        ("mesa", "saf", ["--teachers"], "2.25 [2.25, 2.25], n = 2"),
        ("mesa", "saf", ["--best"], "4.00 [4.00, 4.00], n = 2"),
    ]:
        lines = [f"digits_noisy method={name}" for name in (one, other)]
        accuracy.main(["less", *lines, *flags, "--kept", str(tmp_path)])
        assert capsys.readouterr().out.strip() == said
