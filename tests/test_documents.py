"""The documents: their code runs, their commands parse, their numbers are the code's."""

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
import yaml
from problems import CLASSES, dataset, network
from records import write_comparison
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import saltflat
from saltflat import MESA, SAF, with_index
from saltflat.cli import _parser
from saltflat.train.measure import MEASURES, chosen

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path.read_text()
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
}


def blocks(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def run(page, **names):
    """What a page's code leaves, run from top to bottom with what all pages take for granted."""
    model = names.setdefault("model", network())
    x, y = dataset().tensors
    names = {
        "x": x,
        "y": y,
        "train_set": dataset(),
        "num_classes": CLASSES,
        "epochs": 7,
        "loader": DataLoader(with_index(dataset()), 8, shuffle=True),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        **names,
    }
    for block in blocks(page):
        exec(block, names)
    return names


def test_the_readmes_sam_loop_runs_as_it_stands():
    model = network()
    names = {
        "model": model,
        "loader": DataLoader(dataset(), 8),
        "cross_entropy": cross_entropy,
        "torch": torch,
    }
    exec(next(block for block in blocks("README") if "SAM" in block), names)
    assert names["optimizer"].steps == 3


def test_the_landscape_guides_code_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("docs/guides/landscapes")
    assert capsys.readouterr().out.startswith("(11, 11) ")
    assert (tmp_path / "landscape.npz").exists()


def test_the_report_guides_code_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_comparison(tmp_path / "runs" / "compare")
    run("docs/guides/report")
    assert "Training loss" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "figures" / "training_loss_small_cnn.pdf").exists()


CHECKED = (
    "README",
    "docs/integrations/",
    "docs/methods/",
    *(f"docs/guides/{name}" for name in ("landscapes", "report", "sharpness")),
)
"""Pages whose code is run by tests of their own, which look at what comes of it."""


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p) and not p.startswith(CHECKED)])
def test_a_pages_code_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(page)
    if "range(epochs)" in PAGES[page] and page != "docs/guides/distributed":
        terms = [names[name] for name in ("saf", "mesa") if name in names]
        assert terms and all(term.epoch == 6 and term.active for term in terms)


def test_the_distributed_guides_loop_trains(tmp_path, monkeypatch):
    train, model = run("docs/guides/distributed")["train"], network()
    before = model[0].weight.detach().clone()
    alone = {"init_method": f"file://{tmp_path}/meet", "rank": 0, "world_size": 1}
    start = torch.distributed.init_process_group
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: start("gloo", **alone))
    try:
        trained = train(
            model, dataset(), lambda m: torch.optim.SGD(m.parameters(), 0.1), 7, CLASSES
        )
    finally:
        torch.distributed.destroy_process_group()
    assert not torch.equal(trained.module[0].weight, before)


def commands(page):
    """The saltflat commands of a page, as lists of arguments."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"; |&&|\|\|", line):
                words = shlex.split(part, comments=True)
                for name in ("saltflat", ".venv/bin/saltflat"):
                    if name in words:
                        yield words[words.index(name) + 1 :]


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))])
def test_a_pages_commands_are_ones_that_saltflat_knows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "mine.yaml").write_text("epochs: 1\n")
    parser = _parser()
    for arguments in commands(page):
        assert parser.parse_args(arguments).command == arguments[0]


def test_the_notebook_runs():
    plt.switch_backend("Agg")
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    names = {}
    for source in code:
        exec(source.replace("EPOCHS = 40", "EPOCHS = 7"), names)
    accuracies, terms = names["results"]["SAF"]
    assert len(accuracies) == 7 and terms[4] == 0 and terms[5] > 0
    assert [len(axes.lines) for axes in names["figure"].axes] == [2, 2]
    plt.close(names["figure"])


def test_the_guide_to_memory_has_the_sizes_that_saf_has():
    rows = re.findall(
        r"^\| [\w-]+ \(([\d,]+) x ([\d,]+)\) \| (.*) \|$", PAGES["docs/guides/memory"], re.MULTILINE
    )
    assert len(rows) == 3
    units = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    for samples, classes, sizes in rows:
        numbers = [int(number.replace(",", "")) for number in (samples, classes)]
        for storage, said in zip(("float32", "float16", "uint8"), sizes.split(" | "), strict=True):
            size, unit = said.split()
            assert f"{SAF.estimate_bytes(*numbers, storage=storage) / units[unit]:.1f}" == size


def test_every_picture_of_the_documents_is_there_and_light():
    pictures = [
        path.parent / name
        for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text())
    ]
    assert len(pictures) > 5
    for picture in pictures:
        assert 2_000 < picture.stat().st_size < 300_000


METHODS = {name: getattr(saltflat.sam, name) for name in saltflat.sam.__all__}
METHODS |= {"SAF": SAF, "MESA": MESA}


def test_every_method_has_a_card():
    cards = {page for page in PAGES if page.startswith("docs/methods/")}
    assert cards == {f"docs/methods/{name.lower()}" for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_a_cards_code_runs_and_its_defaults_are_the_signatures(name):
    page = f"docs/methods/{name.lower()}"
    card, model = PAGES[page], network()
    before = model[0].weight.detach().clone()
    run(page, model=model)
    assert not torch.equal(model[0].weight, before)
    signature = inspect.signature(METHODS[name]).parameters
    keywords = {n: p.default for n, p in signature.items() if p.kind is p.KEYWORD_ONLY}
    defaults = {n: getattr(value, "__name__", repr(value)) for n, value in keywords.items()}
    assert dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", card, re.MULTILINE)) == defaults
    for section in ("Use", "Settings", "Cost", "Where it does not help", "Reference"):
        assert f"\n## {section}\n" in card


def test_the_guide_to_sharpness_says_what_measures_take_and_cost():
    names, text = run("docs/guides/sharpness"), PAGES["docs/guides/sharpness"]
    rows = [(names["x"].repeat(6, 1), names["y"].repeat(6))]
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


def test_mesas_settings_in_other_repositories_can_be_built():
    assert run("docs/methods/mesa")["mesa"].start_epoch == 75
    card = PAGES["docs/methods/mesa"]
    row = r"^\| .* \| .* \| ([\d.]+) \| (\d) \| `(True|False)` \| (E // 4(?: \+ 1)?|5) \| .* \|$"
    rows = re.findall(row, card, re.MULTILINE)
    for weight, temperature, squared, start in rows:
        start_epoch = {"5": 5, "E // 4": 75, "E // 4 + 1": 76}[start]
        MESA(
            network(),
            weight=float(weight),
            temperature=float(temperature),
            tau_squared=squared == "True",
            start_epoch=start_epoch,
        )
    assert len(rows) == 4


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
