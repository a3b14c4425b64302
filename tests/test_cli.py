import json
import subprocess
import sys

import pytest

from saltflat.cli import COMMANDS, main
from saltflat.train.methods import METHODS

SMALL = ["--data.train_size=128", "--data.batch_size=32", "--epochs=2"]


def test_train_from_options_and_from_yaml_is_one_run(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {train_size: 128, batch_size: 32}\n"
        "method: {name: sam, settings: {rho: 0.1}}\n"
        "epochs: 2\n"
    )
    main(["train", "--config", str(recipe), f"--out={tmp_path / 'yaml'}"])
    options = ["--method.name=sam", "--method.settings.rho=0.1"]
    main(["train", *SMALL, *options, f"--out={tmp_path / 'options'}"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert said[0].split(": ")[1].split(",")[0] == said[1].split(": ")[1].split(",")[0]
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("yaml", "options")]
    assert configs[0] == configs[1]
    assert configs[0]["method"] == {"name": "sam", "settings": {"rho": 0.1}}


def test_an_option_overrides_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {train_size: 128, batch_size: 32}\nepochs: 3\n")
    main(["train", "--config", str(recipe), "--epochs=1", f"--out={tmp_path / 'run'}"])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["epochs"] == 1


def test_compare_prints_a_table_and_a_verdict(tmp_path, capsys):
    main(["compare", *SMALL, "--methods=[base,sam]", "--seeds=2", f"--out={tmp_path}"])
    said = capsys.readouterr().out
    assert "comparing base, sam on digits, 128 training images" in said
    assert "accuracy, last epoch" in said
    assert "sam: " in said and "95 % interval" in said
    assert said.splitlines()[-1] == f"page: {tmp_path / 'report.html'}"
    page = (tmp_path / "report.html").read_text()
    assert "saltflat compare --data.train_size=128" in page
    assert "saltflat train --data.train_size=128 --data.batch_size=32" in page
    mean = json.loads((tmp_path / "summary.json").read_text())["rows"][1]["accuracy"]["mean"]
    assert f'data-name="accuracy" data-title="accuracy, %" data-value="{mean}"' in page


def test_without_the_train_extra_the_command_is_one_line():
    script = """
import runpy, sys
sys.modules["jsonargparse"] = None
runpy.run_module("saltflat", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "saltflat: the command line needs: pip install 'saltflat[train]', or '.[train]' in a "
        "checkout\n"
    )


def test_compare_without_the_report_extra_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("saltflat.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("saltflat.train.compare.compare", lambda *args, **kwargs: [])
    monkeypatch.setattr("saltflat.cli.commands._show", lambda lines: None)
    monkeypatch.setattr("saltflat.train.compare.verdicts", lambda rows: [])
    main(["compare", "--methods=[base]", f"--out={tmp_path}"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no page") and "pip install 'saltflat[report]'" in last


SYNTHETIC = ["--data.name=synthetic:8:4:64", "--data.batch_size=32"]


def test_train_on_synthetic_images(tmp_path):
    main(["train", *SYNTHETIC, "--epochs=1", f"--out={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "result.json").exists()


def test_bench_prints_what_it_writes(tmp_path, capsys):
    out = tmp_path / "new"
    main(
        [
            *("bench", *SYNTHETIC, "--methods=[base,sam,esam]", "--rounds=2", "--steps=2"),
            *("--settings={esam: {gamma: 0.25}}", "--accuracies={base: 70.5, sam: 71}"),
            f"--out={out}",
        ]
    )
    line, *lines = capsys.readouterr().out.splitlines()
    record = json.loads((out / "bench.json").read_text())
    assert record["command"].startswith("saltflat bench --data.name=synthetic:8:4:64")
    assert "--out" not in record["command"] and str(tmp_path) not in record["command"]
    for fact in ("work", "hardware", "versions", "command"):
        assert record[fact] and record[fact] in line
    assert "n = 2 rounds of 2 steps" in line
    assert [row["method"] for row in record["rows"]] == ["base", "sam", "esam"]
    assert record["rows"][2]["forward_passes"] == 2.25
    assert all(len(row["seconds"]) == 2 for row in record["rows"])
    shown = [[cell.strip() for cell in row.split("│")[1:-1]] for row in lines if "│" in row]
    text = (out / "bench.md").read_text()
    for cells in shown:
        assert f"| {' | '.join(cells)} |" in text
    assert [cells[0] for cells in shown] == ["base", "sam", "esam"]
    picture = (out / "accuracy_speed.svg").read_text()
    assert "<!-- sam -->" in picture and "<!-- esam -->" not in picture
    assert (out / "accuracy_speed.png").exists()


def test_bench_writes_nothing_unless_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["bench", *SYNTHETIC, "--methods=[saf]", "--rounds=1", "--steps=1"])
    assert " 1 + 1 " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_sharpness_prints_what_it_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    early = ["--method.settings.start_epoch=1"]
    main(["train", *SMALL, "--out=runs/base"])
    main(["train", *SMALL, "--method.name=mesa", *early, "--out=runs/mesa"])
    capsys.readouterr()
    (tmp_path / "few.yaml").write_text("measures: [sam, m]\nsettings: {m: {m: 16}}\nimages: 100\n")
    options = [
        "--config=few.yaml",
        "--rho=0.1",
        "--batchnorm=batch",
        "--seed=3",
        "--out=new/s.json",
    ]
    main(["sharpness", "runs/base", "runs/mesa", *options])
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "new" / "s.json").read_text())
    assert record["command"].startswith("saltflat sharpness runs/base runs/mesa")
    assert record["measures"] == {"sam": {"rho": 0.1}, "m": {"rho": 0.1, "m": 16}}
    assert [(row["run"], row["method"], row["epochs"]) for row in record["rows"]] == [
        ("runs/base", "base", 2),
        ("runs/mesa", "mesa", 2),
    ]
    for row in record["rows"]:
        sam, m = row["results"]["sam"], row["results"]["m"]
        assert sam["batchnorm"] == m["batchnorm"] == "batch" and sam["images"] == 100
        low, high = m["interval"]["low"], m["interval"]["high"]
        assert f"{sam['value']:.4g}" in said and f"{m['value']:.4g} [{low:.4g}, {high:.4g}]" in said
    assert "up to 100 training images of each run, seed 3; BatchNorm: batch; float32" in said
    assert "sam: rho 0.1; m: rho 0.1, m 16" in said
    main(["sharpness", "runs/mesa", "--measures=[sam]", "--images=100", "--teacher=true"])
    assert "the moving average of the weights" in capsys.readouterr().out
    for arguments, message in {
        ("runs/base", "--teacher=true"): "keeps no moving average of its weights",
        ("runs",): "name those inside, as runs/base",
        ("runs/base", "--images=0"): "images must be at least 1, got 0",
    }.items():
        with pytest.raises(SystemExit):
            main(["sharpness", *arguments])
        assert message in capsys.readouterr().err


def test_methods_models_and_recipes(capsys, tmp_path, monkeypatch):
    main(["methods"])
    said = capsys.readouterr().out
    assert all(f" {name} " in said for name in METHODS)
    main(["models"])
    said = capsys.readouterr().out
    assert "pyramidnet110" in said and "timm" in said
    main(["recipes"])
    said = capsys.readouterr().out
    assert "cifar100_resnet18_saf" in said and "80.06" in said
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["recipes"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"Example: saltflat {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--epochss=3"], "unknown option --epochss: did you mean '--epochs'?"),
        (["train", "--data.batchsize=3"], "did you mean '--data.batch_size'?"),
        (["train", "--epochs=many"], "epochs"),
        (["train", "--epochs=0"], "epochs must be at least 1, got 0"),
        (["train", "--method.name=messa"], "unknown method 'messa': did you mean 'mesa'?"),
        (["train", "--method.name=saf", "--method.settings.wieght=1"], "did you mean 'weight'?"),
        (["train", "--method.name=saf", "--epochs=3"], "compares with 3 epochs ago"),
        (["train", "--data.name=nothing.npz"], "nothing.npz"),
        (["train", "--data.name=digit"], "did you mean 'digits'?"),
        (["train", "--data.batch_size=4000"], "batch"),
        (["train", "--resume=nowhere"], "nowhere holds no run"),
        (["compare", "--settings={sma: {rho: 1}}"], "settings for sma, not among the methods"),
        (["bench", "--methods=[base,safe]"], "unknown method 'safe': did you mean 'saf'?"),
        (["bench", "--methods=[saf,saf]"], "methods must be different ones, got saf, saf"),
        (["bench", "--methods=[]"], "bench needs a method at least"),
        (["bench", "--settings={sma: {rho: 1}}"], "settings for sma, not among the methods"),
        (["bench", "--accuracies={esam: 1}"], "accuracies for esam, not among the methods"),
        (["bench", "--accuracies={sam: 1}"], "say with --out where it goes"),
        (["bench", "--rounds=0"], "rounds must be at least 1, got 0"),
        (["bench", "--steps=0"], "steps must be at least 1, got 0"),
        (["bench", "--data.name=synthetic:x"], "not of the form synthetic:SIDE:CLASSES[:SAMPLES]"),
        (["train", "--track-sharpness=-1"], "track_sharpness must be 0 or more, got -1"),
        (["train", "--track-sharpnes=1"], "did you mean '--track_sharpness'?"),
        (["sharpness"], "there is no run to measure: name folders that saltflat train has written"),
        (["sharpness", "nowhere"], "nowhere holds no run: there is no such folder"),
        (["sharpness", "nowhere", "--rho=-0.1"], "rho must be 0 or more, got -0.1"),
        (["sharpness", "nowhere", "--batchnorm=train"], "batchnorm"),
        (["sharpness", "nowhere", "--measures=[sma]"], "unknown measure 'sma': did you mean 'sam'"),
        (["sharpness", "nowhere", "--measures=[]"], "there is no measure to take. Known: sam, max"),
        (["sharpness", "nowhere", "--settings={max: {steps: 2}}"], "settings for max, not among"),
        (
            ["sharpness", "nowhere", "--settings={sam: {roh: 2}}"],
            "sam has no setting 'roh'",
        ),
        (
            ["sharpness", "nowhere", "--settings={sam: {rho: x}}"],
            "sam's rho must be of the type float",
        ),
        (["sharpness", "nowhere", "--image=3"], "unknown option --image: did you mean '--images'?"),
        (["sharpness", "nowhere", "--out=."], ". is a folder: name a file, as ./sharpness.json"),
        (["tarin"], "train"),
    ],
)
def test_bad_input_is_a_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in said
    assert said.startswith("saltflat: ") and said.count("\n") <= 2
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_of_a_recipe(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("modle: small_cnn\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(recipe)])
    assert "unknown key modle: did you mean 'model'?" in capsys.readouterr().err


def test_debug_shows_the_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="unknown method"):
        main(["train", "--method.name=nonsense", "--debug"])
