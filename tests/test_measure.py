import dataclasses
import inspect

import pytest
import torch
from torch.nn.functional import cross_entropy

from saltflat import sharpness
from saltflat.sharpness import sam_sharpness, top_eigenvalues
from saltflat.train import Config, DataConfig, MethodConfig, fit, measure
from saltflat.train.runs import open_run

SMALL = Config(data=DataConfig(train_size=96, batch_size=32, label_noise=0.1), epochs=2)
QUICK = {
    "max": {"steps": 2},
    "m": {"m": 16},
    "adaptive": {"steps": 2},
    "average": {"draws": 2},
    "eigenvalues": {"iterations": 3},
    "trace": {"hvps": 6},
    "spectrum": {"draws": 1, "iterations": 3},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ema"
    fit(dataclasses.replace(SMALL, method=MethodConfig("ema", {"decay": 0.9})), folder)
    return folder


def test_every_measure_is_on_the_command_line():
    public = [getattr(sharpness, name) for name in sharpness.__all__]
    functions = {f for f in public if inspect.isfunction(f)}
    known = set(measure.MEASURES.values())
    assert functions - known == {sam_sharpness}
    assert {f.__name__ for f in known - functions} == {"one_step"}


def test_rows_are_what_the_functions_give(run):
    chosen = measure.chosen(list(measure.MEASURES), rho=0.02, settings=QUICK)
    (row,) = measure.measure([run], chosen, images=40, seed=2, precision="float64")
    opened = open_run(run)
    data = [(x.double(), y) for x, y in opened.batches(40, seed=2)]
    model = opened.model.double()
    assert row.results["sam"].value == sam_sharpness(model, cross_entropy, data, rho=0.02)
    assert row.results["eigenvalues"] == top_eigenvalues(
        model, cross_entropy, data, iterations=3, seed=2
    )
    assert (row.method, row.epochs, row.run) == ("ema", 2, run)
    measured = {name: result.images for name, result in row.results.items()}
    assert measured == {**dict.fromkeys(measure.MEASURES, 40), "m": 32}
    assert all(row.results[name].rho == 0.02 for name in ("sam", "max", "m", "average"))
    header, line = measure.table([row])
    cells = dict(zip(header, line, strict=True))
    assert cells["images"] == "40" and "not converged, within" in cells["eigenvalues"]
    assert " to " in cells["spectrum"] and cells["trace"].endswith("]")
    (average,) = measure.measure([run], measure.chosen(["sam"]), images=40, teacher=True)
    assert average.results["sam"].value == sam_sharpness(
        open_run(run).teacher, cross_entropy, open_run(run).batches(40)
    )


def test_a_run_that_cannot_be_opened_is_known_before_another_is_measured(run, tmp_path):
    said = []
    with pytest.raises(ValueError, match="nowhere holds no run"):
        measure.measure([run, tmp_path / "nowhere"], measure.chosen(["sam"]), say=said.append)
    assert said == []


def test_what_cannot_be_measured_is_named(run, monkeypatch):
    opened = open_run(run)
    with torch.no_grad():
        next(opened.model.parameters()).fill_(float("nan"))
    monkeypatch.setattr(measure, "open_run", lambda *_, **__: opened)
    with pytest.raises(ValueError, match=r"ema: eigenvalues: the second derivatives .* diverged"):
        measure.measure([run], measure.chosen(["eigenvalues"]), images=40)
