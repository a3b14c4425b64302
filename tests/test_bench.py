import sys
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from statistics import median

import pytest
import torch

from saltflat.train import Config, DataConfig, MethodConfig
from saltflat.train.bench import Row, bench, heading, table, timed_rounds, write
from saltflat.train.files import read_json
from saltflat.train.methods import METHODS
from saltflat.train.provenance import command, hardware, provenance, without_folders

SMALL = Config(data=DataConfig("synthetic:8:4:32", batch_size=8))


def of(*names, config=SMALL):
    return {name: replace(config, method=MethodConfig(name)) for name in names}


def clock_of(spent, begin=100.0):
    """A clock by which the runs, in turn, take these seconds; between them one passes."""
    ticks = accumulate((part for seconds in spent for part in (seconds, 1.0)), initial=begin)
    return ticks.__next__


@pytest.mark.parametrize("name", METHODS)
def test_the_passes_that_are_counted_are_those_of_the_table(name):
    (row,) = bench(of(name), rounds=1, steps=10)
    assert table([row])[1][-1] == METHODS[name].passes


def test_passes_are_counted_not_looked_up():
    settings = {"sam": {"interval": 2}, "esam": {"gamma": 0.25}}
    configs = {n: replace(SMALL, method=MethodConfig(n, s)) for n, s in settings.items()}
    sam, esam = bench(configs, rounds=1, steps=4)
    assert (sam.forward_passes, sam.backward_passes) == (1.5, 1.5)
    assert (esam.forward_passes, esam.backward_passes) == (2.25, 1.25)


def test_passes_of_a_batch_in_parts():
    parts = replace(SMALL, optimizer=replace(SMALL.optimizer, accumulate=3))
    base, mesa = bench(of("base", "mesa", config=parts), rounds=1, steps=2)
    assert (base.forward_passes, base.backward_passes) == (1, 1)
    assert (mesa.forward_passes, mesa.backward_passes) == (2, 1)


def test_passes_of_a_compiled_model_which_calls_no_hooks(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model.forward)
    (row,) = bench(of("sam", config=replace(SMALL, compile=True)), rounds=1, steps=2)
    assert (row.forward_passes, row.backward_passes) == (2, 2)


def test_every_round_takes_every_method_in_turn():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in ("base", "sam", "saf")}
    seconds = timed_rounds(runs, 2, clock_of([9, 9, 9, 1, 2, 3, 4, 5, 6]))
    assert order == ["base", "sam", "saf"] * 3
    assert seconds == {"base": [1, 4], "sam": [2, 5], "saf": [3, 6]}  # the first round warms up


def test_speeds_and_ratios_by_a_known_clock():
    base, sam = [1.0, 2.0, 4.0, 5.0], [2.0, 8.0, 5.0, 50.0]
    spent = [70.0, 30.0] + [seconds for turn in zip(base, sam, strict=True) for seconds in turn]
    rows = bench(of("base", "sam"), rounds=4, steps=3, clock=clock_of(spent))
    assert [row.method for row in rows] == ["base", "sam"]
    assert rows[0].seconds == tuple(base) and rows[1].seconds == tuple(sam)
    images = 3 * 8
    assert rows[0].images_per_second == pytest.approx(median(images / s for s in base))
    assert rows[1].images_per_second == pytest.approx(median(images / s for s in sam))
    assert (rows[0].ratio, rows[0].ratio_quartiles) == (1, (1, 1))
    # By round, sorted: 0.1, 0.25, 0.5, 0.8; not the ratio of the medians, 3 / 6.5.
    assert rows[1].ratio == pytest.approx(0.375)
    assert rows[1].ratio_quartiles == pytest.approx((0.2125, 0.575))


def test_a_ratio_is_of_images_where_the_batches_differ():
    large = replace(SMALL, data=replace(SMALL.data, batch_size=16))
    spent = [1.0] * 2 + [1.0, 4.0]
    rows = bench({"small": SMALL, "large": large}, rounds=1, steps=1, clock=clock_of(spent))
    assert [row.images_per_second for row in rows] == [8, 4]
    assert rows[1].ratio == 0.5


def test_memory_on_the_cpu():
    rows = bench(of("base", "saf", "mesa", "looksam"), rounds=1, steps=5)
    extra = {row.method: row.extra_bytes for row in rows}
    assert extra["base"] == 0 and all(extra[name] > 0 for name in ("saf", "mesa", "looksam"))
    if not torch.cuda.is_available():
        assert {row.peak_bytes for row in rows} == {None}


def test_an_epoch_shorter_than_a_round_is_followed_by_the_next():
    (row,) = bench(of("saf"), rounds=2, steps=9)  # of epochs of four steps
    assert row.forward_passes == 1


@pytest.mark.parametrize(
    ("configs", "kwargs", "message"),
    [
        ({}, {}, "bench needs a method at least"),
        (of("base"), {"rounds": 0}, "rounds must be at least 1, got 0"),
        (of("base"), {"steps": 0}, "steps must be at least 1, got 0"),
        (of("bsae"), {}, "unknown method 'bsae'"),
    ],
)
def test_bad_input(configs, kwargs, message):
    with pytest.raises(ValueError, match=message):
        bench(configs, **kwargs)


ROWS = [
    Row("base", 5e4, 1.0, (1.0, 1.0), 2**30, 0, 1.0, 1.0, (0.1, 0.2)),
    Row("mesa", 4e4, 0.8, (0.79, 0.82), None, 2**20, 2.0, 1.0, (0.2, 0.3)),
]


def test_the_table():
    header, base, mesa = table(ROWS)
    assert dict(zip(header, base, strict=True)) == {
        "method": "base",
        "images/s": "50,000",
        "speed": "100.0%",
        "quartiles": "100.0% to 100.0%",
        "peak memory": "1,024.0 MiB",
        "kept memory": "0.00 MiB",
        "passes": "1 + 1",
    }
    assert mesa[3:] == ["79.0% to 82.0%", "", "1.00 MiB", "2 + 1"]


def test_the_files(tmp_path):
    facts = {
        "work": "a net",
        **provenance("saltflat bench", torch.device("cpu")),
        "rounds": 2,
        "steps": 10,
    }
    write(tmp_path / "new", facts, ROWS)
    record = read_json(tmp_path / "new" / "bench.json")
    assert record.keys() == {*facts, "rows"}
    assert record["rows"][1] == {
        **asdict(ROWS[1]),
        "ratio_quartiles": [0.79, 0.82],
        "seconds": [0.2, 0.3],
    }
    text = (tmp_path / "new" / "bench.md").read_text()
    assert text.startswith(heading(facts) + "\n\n| method |") and "\n| mesa | 40,000 |" in text
    for fact in ("a net", record["hardware"], record["versions"], "n = 2 rounds of 10 steps"):
        assert fact in heading(facts)


def test_provenance_is_of_the_device_that_was_used():
    facts = provenance("saltflat bench", torch.device("cpu"))
    assert facts["hardware"] == hardware(torch.device("cpu"))
    assert f", {torch.get_num_threads()} of " in facts["hardware"]
    assert f"torch {torch.__version__}, CUDA not used" in facts["versions"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["saltflat", "bench", "--out", "/a/b", "--rounds", "3"], "saltflat bench --rounds 3"),
        (["saltflat", "bench", "--out=/a/b"], "saltflat bench"),
        (["saltflat", "bench", "--data.name", "/a/my b/c.npz"], "saltflat bench --data.name c.npz"),
        (["saltflat", "--methods", "[base,saf]"], "saltflat --methods '[base,saf]'"),
    ],
)
def test_the_command_is_for_any_machine(words, expected):
    assert command(*words) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/a", "a"),
        ("/a/b/", "b/"),
        ("hf:/a/b", "hf:b"),
        ("hf:someone/cifar", "hf:someone/cifar"),
        ("recipes/a.yaml", "recipes/a.yaml"),
        ("../a/b", "../a/b"),
        ("--config=/a/b.yaml", "--config=b.yaml"),
        ("{saf: {one: /a/b}, mesa: {two: '/c/d'}}", "{saf: {one: b}, mesa: {two: 'd'}}"),
    ],
)
def test_absolute_paths_become_names(word, expected):
    assert without_folders(word) == expected


def test_the_picture_has_every_method_where_it_belongs(tmp_path):
    from saltflat.report.figures import accuracy_speed

    points = {"base": (50_000.0, 78.0), "sam": (25_000.0, 79.5), "saf": (49_800.0, 80.1)}
    rows = [
        {"method": name, "images_per_second": speed, "accuracy": accuracy}
        for name, (speed, accuracy) in points.items()
    ]
    (axes,) = accuracy_speed(rows, tmp_path / "accuracy_speed").axes
    drawn = [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines]
    assert drawn == list(points.values())
    assert {text.get_text(): text.xy for text in axes.texts} == points
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "training speed, images/s",
        "test accuracy, %",
    )
    assert axes.get_xlim()[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accuracy_speed.pdf",
        "accuracy_speed.png",
        "accuracy_speed.svg",
    ]


def test_a_missing_matplotlib_is_named_with_its_command(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("saltflat.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'saltflat\[report\]'"):
        import saltflat.report.figures  # noqa: F401


def test_benchmarks_are_recorded_by_the_same_words(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/some.py", "--batch", "8", "--out", "/y"])
    import record

    record.write("some", "Some", {"heading": [{"a": 1, "b": "x"}]}, tmp_path)
    (path,) = tmp_path.glob("some_*.json")
    facts = read_json(path)
    assert facts["command"] == "python benchmarks/some.py --batch 8"
    assert facts["tables"] == {"heading": [{"a": 1, "b": "x"}]}
    assert "| a | b |\n| --- | --- |\n| 1 | x |" in path.with_suffix(".md").read_text()
