"""The README's code and the example do what they say."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from problems import CLASSES, SAMPLES, dataset, network
from records import write_comparison
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import saltflat
from saltflat import MESA, mesa_dialect
from saltflat.train.measure import MEASURES, chosen

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["SAF", "MESA", "SAM"])
def test_the_readmes_loops_run_as_they_stand(block):
    model = network()
    names = {
        "model": model,
        "train_set": dataset(),
        "loader": DataLoader(dataset(), 8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "epochs": 7,
        "DataLoader": DataLoader,
        "cross_entropy": cross_entropy,
        "torch": torch,
    }
    exec(block.replace("num_classes=100", f"num_classes={CLASSES}"), names)
    if "SAM" in names:
        assert names["optimizer"].steps == 3
        return
    term = names.get("saf") or names["mesa"]
    assert term.epoch == 6
    assert names["loss"] > cross_entropy(names["logits"], names["y"])
    if "saf" in names:
        assert term.memory.num_samples == SAMPLES


def test_the_landscape_guides_code_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "guides" / "landscapes.md").read_text()
    x, y = dataset().tensors
    exec(
        re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], {"model": network(), "x": x, "y": y}
    )
    assert capsys.readouterr().out.startswith("(11, 11) ")
    assert (tmp_path / "landscape.npz").exists()


CARDS = {path.stem: path.read_text() for path in (ROOT / "docs" / "methods").glob("*.md")}


def test_the_report_guides_code_runs_as_it_stands(tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "guides" / "report.md").read_text()
    monkeypatch.chdir(tmp_path)
    write_comparison(tmp_path / "runs" / "compare")
    exec(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], {})
    assert "Training loss" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "figures" / "training_loss_small_cnn.pdf").exists()


def test_every_picture_of_the_documents_is_there_and_light():
    pictures = [
        path.parent / name
        for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text())
    ]
    assert len(pictures) > 5
    for picture in pictures:
        assert 2_000 < picture.stat().st_size < 300_000


METHODS = {**{name: getattr(saltflat.sam, name) for name in saltflat.sam.__all__}, "MESA": MESA}


def test_every_method_of_the_family_has_a_card():
    assert CARDS.keys() == {name.lower() for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_a_cards_code_runs_and_its_defaults_are_the_signatures(name):
    card = CARDS[name.lower()]
    x, y = dataset().tensors
    names = {"model": network(), "x": x, "y": y}
    before = names["model"][0].weight.detach().clone()
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    assert not torch.equal(names["model"][0].weight, before)
    signature = inspect.signature(METHODS[name]).parameters
    defaults = {n: repr(p.default) for n, p in signature.items() if p.kind is p.KEYWORD_ONLY}
    assert dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", card, re.MULTILINE)) == defaults
    for section in ("Use", "Settings", "Cost", "Where it does not help", "Reference"):
        assert f"\n## {section}\n" in card


def test_the_guide_to_sharpness_says_what_measures_take_and_cost():
    text = (ROOT / "docs" / "guides" / "sharpness.md").read_text()
    x, y = dataset().tensors
    rows, names = [(x.repeat(6, 1), y.repeat(6))], {"model": network(), "x": x, "y": y}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    lines = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .* \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert [line[0] for line in lines] == list(MEASURES)
    for name, function, settings, cost in lines:
        assert function == MEASURES[name].__name__.replace("one_step", "sam_sharpness")
        said = dict(re.findall(r"`(\w+)=([^`]*)`", settings))
        assert said == {key: str(value) for key, value in chosen([name])[name].items()}
        found = MEASURES[name](network(), cross_entropy, rows)
        if "products" in cost:
            most = int(re.search(r"(\d+) products", cost)[1])
            assert found.hvps == most or ("at most" in cost and 1 < found.hvps <= most)
        else:
            assert f"{found.forward:.0f} + {found.backward:.0f}" == cost


def test_mesas_dialects_are_the_tables_and_its_code_runs():
    names = {"model": network(), "MESA": MESA}
    exec(re.findall(r"```python\n(.*?)```", CARDS["mesa"], re.DOTALL)[1], names)
    assert names["mesa"].start_epoch == 75
    rows = [line.split(" | ") for line in CARDS["mesa"].splitlines() if line.endswith('"` |')]
    starts = {"5": 5, "E / 4, rounded up": 3, "E // 4 + 1": 3}
    for _, _, weight, temperature, squared, start, decay, name in rows:
        dialect = mesa_dialect(name.strip('`"| '), epochs=10)
        assert dialect["weight"] == float(weight)
        assert dialect["temperature"] == float(temperature)
        assert f"`{dialect['tau_squared']}`" == squared
        assert dialect["start_epoch"] == starts[start]
        assert str(dialect.get("decay", "theirs")) == decay
    assert len(rows) == 4


PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "integrations").glob("*.md")}


def named(page):
    """What a page takes for granted."""
    names = {"train_set": dataset(), "num_classes": CLASSES, "epochs": 7, "net": network()}
    if page == "transformers":
        from test_transformers import bert, texts

        return {**names, "train_set": texts(), "model": bert()}
    return {**names, "model": names["net"]}


@pytest.mark.filterwarnings("ignore")  # the frameworks' own
@pytest.mark.parametrize("page", ["lightning", "transformers", "accelerate", "timm"])
def test_an_integrations_page_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = named(page)
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
        exec(block, names)
    if page == "transformers":
        logged = [log.get("trajectory_loss", 0) for log in names["trainer"].state.log_history]
        assert names["trainer"].term is names["mesa"] and names["mesa"].epoch == 1, logged
        return
    terms = [names.get(name) for name in ("saf", "mesa")]
    terms = [getattr(term, "term", term) for term in terms if term is not None]
    if page == "timm":
        terms.append(names["task"].term)
        assert names["first_epoch"] == 7
    assert len(terms) == 2 and all(term.epoch == 6 and term.started for term in terms)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("lightning_digits.py", r"saf, 2 epochs, .*'accuracy': '0.\d+'"),
        ("transformers_text.py", r"saf: test accuracy [\d.]+ %"),
        ("accelerate_digits.py", r"epoch 1, 1 process.*test accuracy [\d.]+ %"),
        ("timm_digits.py", r"epoch 1: .*test accuracy [\d.]+ %"),
    ],
)
def test_an_example_runs(script, said, tmp_path):
    assert script in PAGES[script.partition("_")[0]]
    command = [sys.executable, str(ROOT / "examples" / script), "--epochs", "2", "--out"]
    result = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert re.search(said, result.stdout), result.stderr


def test_the_demo_prints_accuracies():
    command = [
        sys.executable,
        str(ROOT / "examples" / "digits.py"),
        "--epochs",
        "7",
        "--seeds",
        "1",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.findall(r"^(SGD|SAF): test accuracy ([\d.]+) %", result.stdout, re.MULTILINE)
    assert [name for name, _ in found] == ["SGD", "SAF"], result.stderr
    assert all(float(accuracy) > 60 for _, accuracy in found)


def test_the_citation_is_well_formed_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == saltflat.__version__
    assert citation["preferred-citation"]["title"] == "Sharpness-Aware Training for Free"
    assert len(citation["preferred-citation"]["authors"]) == 5
