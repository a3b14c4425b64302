"""The adapters' pages and examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from problems import CLASSES, dataset, network

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "integrations").glob("*.md")}


def run(page, **names):
    """What a page's code leaves, run from top to bottom."""
    names = {"train_set": dataset(), "num_classes": CLASSES, "epochs": 7, **names}
    for block in re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names


@pytest.mark.filterwarnings("ignore")  # the frameworks' own
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = network()
    if page == "transformers":
        from test_transformers_adapter import bert, texts

        names = run(page, model=bert(), train_set=texts())
        logged = [log.get("trajectory_loss", 0) for log in names["trainer"].state.log_history]
        assert names["trainer"].term is names["mesa"] and names["mesa"].epoch == 1, logged
        return
    names = run(page, net=net, model=net)
    terms = [getattr(names[name], "term", names[name]) for name in ("saf", "mesa") if name in names]
    if page == "timm":
        terms.append(names["task"].term)
        assert names["first_epoch"] == 7
    assert len(terms) == 2 and all(term.epoch == 6 and term.active for term in terms)


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
