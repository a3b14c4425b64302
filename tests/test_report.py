"""From records on disk to a page and pictures; what the page does in a browser is test_page's."""

import base64
import html
import json
import re
import shlex
import shutil
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from records import SMALL, with_method, write_comparison, write_landscape, write_run

from saltflat.cli import main
from saltflat.landscape import Surface
from saltflat.report.page import page
from saltflat.report.paper import paper_figures
from saltflat.report.pictures import pictures_of, render, thinned, write_figures
from saltflat.report.records import Curve, read_settings
from saltflat.report.style import PAPER
from saltflat.report.surfaces import surfaces_of
from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig, fit
from saltflat.train.folder import read_config


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Cells(HTMLParser):
    """The numbers of the first table, by method and name."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self.row = {}, 0, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.scripts += tag == "script"
        if tag == "tr" and "data-method" in attributes:
            self.row = self.found.setdefault(attributes["data-method"], {})
        if tag == "td" and "data-value" in attributes:
            self.row[attributes["data-name"]] = float(attributes["data-value"])


def test_the_tables_numbers_are_the_summarys(tmp_path):
    write_comparison(tmp_path / "c", methods=("base", "sam", "mesa"))
    summary = json.loads((tmp_path / "c" / "summary.json").read_text())
    cells = Cells(page(read_settings([tmp_path / "c"]), "")).found
    assert list(cells) == ["base", "sam", "mesa"]
    for row in summary["rows"]:
        shown = cells[row["method"]]
        for name in ("best", "images_per_second", "speed", "extra_bytes", "sharpness", "epochs"):
            assert shown[name] == row[name]
        assert shown["accuracy"] == row["accuracy"]["mean"]
        assert shown["n"] == row["accuracy"]["n"]
        assert shown.get("difference") == (row["difference"] or {}).get("mean")
        assert shown.get("teacher") == row["teacher"]


def test_only_the_seeds_of_the_summary_are_read(tmp_path):
    folder = write_comparison(tmp_path / "c", seeds=2)
    write_run(folder / "base" / "seed2", with_method("base", seed=2))
    (setting,) = read_settings([folder])
    assert [len(method.runs) for method in setting.methods] == [2, 2]


def test_single_runs_are_put_together_by_config(tmp_path):
    for seed in (1, 0):
        write_run(tmp_path / f"base{seed}", with_method("base", seed=seed))
        write_run(tmp_path / f"saf{seed}", with_method("saf", seed=seed, weight=0.5))
    write_run(tmp_path / "other", with_method("saf"), complete=False)
    (setting,) = read_settings(sorted(path for path in tmp_path.iterdir()))
    labels = [method.label for method in setting.methods]
    assert labels == ["base", "saf (weight default)", "saf (weight 0.5)"]
    base, going, saf = setting.methods
    assert [run.config["seed"] for run in base.runs] == [0, 1]
    ends = [run.metrics[-1]["accuracy"] for run in saf.runs]
    accuracy = saf.row["accuracy"]
    assert accuracy["mean"] == pytest.approx(np.mean(ends))
    assert (accuracy["low"], accuracy["high"], accuracy["n"]) == (min(ends), max(ends), 2)
    assert going.row["images_per_second"] is None and going.row["epochs"] == 1
    text = page([setting], "")
    assert "were not made by one comparison" in text and "lowest to the highest seed" in text
    assert "to the highest seed" not in page(read_settings([tmp_path / "base0"]), "")


def test_a_curve_is_the_mean_and_the_range_of_its_seeds(tmp_path):
    folder = write_comparison(tmp_path / "c", sharpness_every=2)
    lines = [read_lines(folder / "sam" / f"seed{s}" / "metrics.jsonl") for s in (0, 1)]
    (setting,) = read_settings([folder])
    curve = setting.methods[1].curve("loss")
    both = np.array([[line["loss"] for line in run] for run in lines])
    np.testing.assert_allclose(curve.mean, both.mean(0))
    np.testing.assert_array_equal((curve.low, curve.high), (both.min(0), both.max(0)))
    assert setting.methods[1].curve("sharpness").x.tolist() == [1]


def test_a_diverged_run_has_a_gap_and_a_page(tmp_path):
    run = write_run(tmp_path / "run")
    lines = read_lines(run / "metrics.jsonl")
    lines[-1]["loss"] = None
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (setting,) = read_settings([run])
    assert setting.methods[0].curve("loss").x.tolist() == [0, 1]
    text = page([setting], "")
    assert "Training loss" in text and "of 1 diverged" not in text
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "diverged": True}))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "track_sharpness": 1}))
    settings = read_settings([run])
    text = page(settings, "")
    assert "1 of 1 diverged" in text and "--track_sharpness" not in text
    assert not any("--track_sharpness" in sentence for sentence in paper_figures(settings)[1])


def test_a_long_curve_is_thinned_and_keeps_its_end():
    x = np.arange(1001.0)
    thin = thinned(Curve("a", x, x, x, x))
    assert len(thin.x) <= 400 and thin.x[-1] == 1000 and thin.mean[-1] == 1000
    assert set(np.diff(thin.x)) == {3.0}


def test_models_side_by_side_have_a_table_each_and_lines_between_them(tmp_path):
    folders = [
        write_comparison(tmp_path / model, replace(SMALL, model=model), landscape={})
        for model in ("small_cnn", "cifar_resnet18")
    ]
    settings = read_settings(folders)
    text = page(settings, "")
    assert [setting.name for setting in settings] == ["small_cnn", "cifar_resnet18"]
    assert text.count('class="results"') == 2
    assert "A line joins the models of a method" in text
    same = write_comparison(tmp_path / "again", replace(SMALL, model="small_cnn"))
    names = [setting.name for setting in read_settings([folders[0], same])]
    assert names == ["small_cnn (small_cnn)", "small_cnn (again)"]


def test_surfaces_come_through_the_page_as_they_were(tmp_path):
    folder = write_comparison(tmp_path / "c", landscape={"points": 150})
    write_landscape(folder / "sam" / "seed0", curvature=1.0, points=21)
    (setting,) = read_settings([folder])
    scale = surfaces_of(setting).scale
    text = page([setting], "")
    assert text.count("saltflat landscape c/*/seed0") == 1
    data = json.loads(re.search(r'id="setting0-surfaces">(.*?)</script>', text)[1])
    assert data["top"] == scale.top == data["levels"][-1]
    assert data["surfaces"][0]["rows"] == 128  # thinned
    sam = data["surfaces"][1]
    steps = np.frombuffer(base64.b64decode(sam["losses"]), "<u2").reshape(21, 21)
    step = (data["ceiling"] - data["bottom"]) / 65535
    losses = setting.methods[1].runs[0].landscape.losses
    inside = losses < data["ceiling"]
    np.testing.assert_allclose((data["bottom"] + step * steps)[inside], losses[inside], atol=step)
    assert np.all(steps[~inside] == 65535)


def test_a_surface_on_its_way_is_said_to_be(tmp_path):
    folder = write_comparison(tmp_path / "c", landscape={})
    path = folder / "sam" / "seed0" / "landscape.npz"
    whole = Surface.load(path)
    losses = np.where(np.arange(21)[:, None] < 15, whole.losses, np.nan)
    replace(whole, losses=losses, done=15 * 21).save(path)
    (setting,) = read_settings([folder])
    assert list(surfaces_of(setting).shown) == ["base", "sam, unfinished"]
    assert "sam, unfinished" in page([setting], "")


def test_landscapes_that_were_made_otherwise_are_left_out_and_said(tmp_path):
    made = {"span": 1.0, "seed": 0, "data": 7}
    folder = write_comparison(tmp_path / "c", methods=("base", "sam", "saf"), landscape=made)
    write_landscape(folder / "base" / "seed0", **{**made, "span": 0.5, "data": 8})
    (setting,) = read_settings([folder])
    assert list(surfaces_of(setting).shown) == ["sam", "saf"]
    text = page([setting], "")
    said = "base, seed 0 is left out: its span is 0.5, not 1.0, its images are others."
    assert text.count(said) == 2  # of the plane, and of the line
    assert "epochs." not in text


def test_a_landscape_of_earlier_weights_is_said_to_be(tmp_path):
    run = write_run(tmp_path / "run", landscape={"epochs": 2})
    assert "base, seed 0 is as it was after 2 of 3 epochs." in page(read_settings([run]), "")


def test_a_landscape_without_a_number_does_not_block_the_page(tmp_path):
    folder = write_comparison(tmp_path / "c", landscape={})
    for name in ("landscape", "landscape_line"):
        path = folder / "sam" / "seed0" / f"{name}.npz"
        whole = Surface.load(path)
        replace(whole, losses=np.full_like(whole.losses, np.nan)).save(path)
    settings = read_settings([folder])
    said = "sam, seed 0 is left out: no loss of its landscape is a number."
    assert list(surfaces_of(settings[0]).shown) == ["base"] and said in page(settings, "")
    shutil.rmtree(folder / "base" / "seed0")
    alone = read_settings([folder / "sam" / "seed0"])
    assert surfaces_of(alone[0]) is None and said in page(alone, "")


def test_a_line_on_its_way_is_said_to_be_and_has_the_place_that_it_will_fill(tmp_path):
    folder = write_comparison(tmp_path / "c", landscape={})
    path = folder / "sam" / "seed0" / "landscape_line.npz"
    whole = Surface.load(path)
    losses = np.where(np.arange(21) < 5, whole.losses, np.nan)
    for name in ("base", "sam"):
        target = folder / name / "seed0" / "landscape_line.npz"
        replace(whole, losses=losses, done=5).save(target)
    (setting,) = read_settings([folder])
    pictures = pictures_of(setting, {"base": 0, "sam": 1})
    line = next(one for one in pictures if one.title == "The loss along a line")
    assert "base is unfinished. sam is unfinished." in line.caption
    assert len(line.lines) == 1 + 5
    (axes,) = render(line, PAPER).axes
    assert axes.get_xlim() == (-1, 1) and 0 < axes.get_ylim()[0] < losses[4]


def test_runs_that_differ_in_what_they_record_are_seeds_of_one_config(tmp_path):
    runs = [
        write_run(tmp_path / "a", with_method("base")),
        write_run(tmp_path / "b", with_method("base", replace(SMALL, track_sharpness=1), seed=1)),
    ]
    (setting,) = read_settings(runs)
    assert [(method.label, len(method.runs)) for method in setting.methods] == [("base", 2)]


def test_a_run_and_its_copy_are_not_two_seeds(tmp_path):
    run = write_run(tmp_path / "run")
    copy = shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(ValueError, match=rf"{run} and {copy} are of one config and one seed"):
        read_settings([run, copy])
    (setting,) = read_settings([run, tmp_path / "copy" / ".." / "run"])  # the same, named twice
    assert len(setting.methods[0].runs) == 1


def test_a_long_label_is_a_letter_with_a_legend(tmp_path):
    for number, weight in enumerate((0.25, 0.5)):
        config = replace(SMALL, label_smoothing=weight, channels_last=bool(number))
        write_run(tmp_path / f"run{number}", with_method("saf", config))
    (setting,) = read_settings(sorted(tmp_path.iterdir()))
    assert [method.label for method in setting.methods] == ["saf A", "saf B"]
    assert "<small>channels_last True, label_smoothing 0.5</small>" in page([setting], "")


def test_comparisons_in_folders_of_one_name_are_told_apart(tmp_path):
    folders = [write_comparison(tmp_path / name / "cmp") for name in ("a", "b")]
    settings = read_settings(folders)
    assert [setting.name for setting in settings] == ["small_cnn (a/cmp)", "small_cnn (b/cmp)"]
    ids = re.findall(r'<figure id="([^"]*)"', page(settings, ""))
    assert len(set(ids)) == len(ids)


def test_a_line_that_is_being_written_is_not_read(tmp_path):
    run = write_run(tmp_path / "run", complete=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "lo')
    (setting,) = read_settings([run])
    assert len(setting.methods[0].runs[0].metrics) == 1


def test_folders_with_spaces_are_quoted_in_commands(tmp_path):
    run = write_run(tmp_path / "my run")
    text = html.unescape(page(read_settings([run]), ""))
    assert f"saltflat landscape '{run}'" in text
    assert f"saltflat train --config '{run}/config.json' --out '{run}'" in text


def test_names_cannot_become_part_of_the_page(tmp_path):
    evil = "<script>alert('x')</script>"
    data = replace(SMALL.data, name=f"{evil}.npz")
    config = replace(SMALL, data=data, model=evil)
    run = write_run(tmp_path / "run<img src=x onerror=alert(1)>", config, landscape={})
    path = run / "config.json"
    values = json.loads(path.read_text())
    values["method"] = {"name": evil, "settings": {evil: evil}}
    path.write_text(json.dumps(values))
    text = page(read_settings([run]), f"saltflat report {evil}")
    assert "<script>alert" not in text and "<img" not in text
    assert Cells(text).scripts == 2  # the page's own, and the landscapes


def test_a_heavy_page_stays_light(tmp_path):
    config = replace(SMALL, epochs=200)
    methods = ("base", "sam", "saf", "mesa", "gsam", "esam")
    landscape = {"points": 100}
    folder = write_comparison(
        tmp_path / "c", config, methods, seeds=5, sharpness_every=1, landscape=landscape
    )
    assert len(page(read_settings([folder]), "").encode()) < 2_000_000


def test_every_figure_is_a_file_at_paper_quality(tmp_path):
    folder = write_comparison(tmp_path / "c", sharpness_every=1, landscape={})
    out = tmp_path / "figures"
    write_figures(read_settings([folder]), out)
    names = {path.stem.removesuffix("_small_cnn") for path in out.iterdir()}
    assert names == {
        *("accuracy_speed", "training_loss", "test_accuracy", "every_seed", "sharpness"),
        *("memory", "landscapes", "contours", "landscape_line"),
    }
    for name in names:
        stem = name if name == "accuracy_speed" else f"{name}_small_cnn"
        with Image.open(out / f"{stem}.png") as image:
            assert image.info["dpi"] == pytest.approx((300, 300), abs=1)
            assert image.width >= 2.7 * 300
            assert len(set(image.convert("L").tobytes())) > 10
        assert b"/FontFile2" in (out / f"{stem}.pdf").read_bytes()  # embedded, and TrueType
        assert "<text" not in (out / f"{stem}.svg").read_text()  # glyphs as paths


def test_the_papers_figures(tmp_path):
    folders = [
        write_comparison(
            tmp_path / model, replace(SMALL, model=model), sharpness_every=1, landscape={}
        )
        for model in ("small_cnn", "cifar_resnet18")
    ]
    figures, missing = paper_figures(read_settings(folders))
    assert sorted(figures) == ["figure1", "figure2", "figure4", "figure5"] and not missing
    lines = [line for line in figures["figure1"].axes[0].lines if len(line.get_xdata()) == 2]
    assert len(lines) == 2  # base and sam, each through both models
    left, right = figures["figure4"].subfigs
    assert left.axes[0].get_ylabel() == "training loss"
    assert right.axes[0].get_ylabel() == "loss rise within rho 0.05"
    assert [axes.get_title() for axes in figures["figure2"].axes] == ["base", "sam"]


def test_a_figure_of_the_paper_that_lacks_its_data_says_what_to_run(tmp_path):
    folder = write_comparison(tmp_path / "c")
    figures, missing = paper_figures(read_settings([folder]))
    assert sorted(figures) == ["figure1"]
    assert any("--track_sharpness" in sentence for sentence in missing)
    assert any(f"saltflat landscape {folder / 'base' / 'seed0'}" in s for s in missing)
    assert any("second model" in sentence for sentence in missing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a report needs runs"),
        (["nowhere"], "nowhere holds no records"),
        (["."], "there are runs below it: digits half"),
        (["empty"], "empty has no tested epoch yet"),
        (["digits", "half"], "of different data"),
        (["damaged"], "config.json is damaged"),
        (["noconfig"], "config.json is not a run's config, it lacks model"),
        (["void"], "landscape.npz is not a surface"),
        (["nosurface"], "landscape.npz is not a surface"),
        (["digits", "--paper"], "say with --figures DIR where they go"),
    ],
)
def test_bad_input_says_what_to_do(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "digits")
    write_run(tmp_path / "half", replace(SMALL, data=replace(SMALL.data, train_size=64)))
    (tmp_path / "sub").mkdir()
    for name, (file, text) in {
        "damaged": ("config.json", "{"),
        "noconfig": ("config.json", "{}"),
        "nosurface": ("landscape.npz", "{"),
        "void": ("landscape.npz", ""),
    }.items():
        run = write_run(tmp_path / "sub" / name)
        (run / file).write_text(text)
        if arguments == [name]:
            shutil.move(run, tmp_path / name)
    if arguments == ["empty"]:
        write_run(tmp_path / "empty")
        (tmp_path / "empty" / "metrics.jsonl").unlink()
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_report_writes_the_page_and_the_figures(tmp_path, capsys):
    folder = write_comparison(tmp_path / "c", sharpness_every=1, landscape={})
    out, figures = tmp_path / "new" / "page.html", tmp_path / "figures"
    main(["report", str(folder), "-o", str(out), f"--figures={figures}", "--paper"])
    said = capsys.readouterr().out
    assert f"page: {out}" in said and f"figures: {figures}" in said
    assert "figure 5 is figure 2 of a second model" in said
    assert out.read_text().startswith("<!doctype html>")
    assert f"-o {out} --figures={figures} --paper" in out.read_text()
    assert (figures / "figure4.pdf").exists() and (figures / "contours_small_cnn.svg").exists()


def test_a_runs_command_makes_the_same_run(tmp_path):
    config = Config(
        data=DataConfig(train_size=64, batch_size=32),
        optimizer=OptimizerConfig(name="adamw", betas=(0.8, 0.9), decay_vectors=False),
        method=MethodConfig("sam", {"rho": 0.1}),
        epochs=1,
        channels_last=True,
        checkpoint_every=2,
    )
    fit(config, tmp_path / "first")
    command = json.loads((tmp_path / "first" / "result.json").read_text())["command"]
    main([*shlex.split(command)[1:], f"--out={tmp_path / 'second'}"])
    assert asdict(read_config(tmp_path / "second")) == asdict(config)
