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
    paths = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    pictures = [
        path.parent / name
        for path in paths
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text())
    ]
    assert len(pictures) > 5
    for picture in pictures:
        assert 2_000 < picture.stat().st_size < 300_000


def test_every_method_of_the_family_has_a_card():
    assert CARDS.keys() == {name.lower() for name in saltflat.sam.__all__}


@pytest.mark.parametrize("name", saltflat.sam.__all__)
def test_a_cards_code_runs_and_its_defaults_are_the_signatures(name):
    card = CARDS[name.lower()]
    x, y = dataset().tensors
    names = {"model": network(), "x": x, "y": y}
    before = names["model"][0].weight.detach().clone()
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    assert not torch.equal(names["model"][0].weight, before)
    signature = inspect.signature(getattr(saltflat.sam, name)).parameters
    defaults = {n: repr(p.default) for n, p in signature.items() if n != "base_optimizer"}
    assert dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", card, re.MULTILINE)) == defaults
    for section in ("Use", "Settings", "Cost", "Where it does not help", "Reference"):
        assert f"\n## {section}\n" in card


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
