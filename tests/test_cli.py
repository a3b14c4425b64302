import json

import pytest

from saltflat.cli import main
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


@pytest.mark.parametrize("command", ["train", "compare", "methods", "models", "recipes"])
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
        (["compare", "--settings={sma: {rho: 1}}"], "settings for sma, which are not compared"),
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
