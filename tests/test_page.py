"""The page in a browser: it draws, turns, fits, and asks the network for nothing."""

import json
import os
import shutil
from itertools import chain

import pytest
from playwright.sync_api import sync_playwright
from records import write_comparison, write_landscape

from saltflat.report.page import write_page
from saltflat.report.records import read_settings

METHODS = ("base", "sam", "saf", "mesa")


def find_browser():
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise RuntimeError("no Chromium: install it (apt install chromium), or set CHROMIUM=PATH")
    return found


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Four methods; the landscapes of base and saf are the same."""
    folder = tmp_path_factory.mktemp("page") / "c"
    write_comparison(folder, methods=METHODS, sharpness_every=1, landscape={"points": 41})
    for name, curvature in {"sam": 2.0, "mesa": 8.0}.items():
        write_landscape(folder / name / "seed0", curvature=curvature, points=41)
    write_page(read_settings([folder]), folder / "report.html", "saltflat report c")
    return folder


class Tab:
    """A page that was opened, with all that went wrong on it."""

    def __init__(self, browser, folder, width=1280, **options):
        self.problems, self.asked = [], []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto((folder / "report.html").as_uri())

    def pictures(self):
        """Of each canvas its pixels, when they stand still."""
        self.page.locator("canvas").first.scroll_into_view_if_needed()
        read = "() => [...document.querySelectorAll('canvas')].map(c => c.toDataURL())"
        before = None
        while before != (before := self.page.evaluate(read)) or len(before[0]) < 2000:
            self.page.wait_for_timeout(250)
        return before


@pytest.fixture
def open_tab(browser, comparison):
    tabs = []

    def open_one(folder=comparison, **options):
        tabs.append(Tab(browser, folder, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        assert tab.problems == []
        assert all(url.startswith(("file:", "data:")) for url in tab.asked)
        tab.context.close()


def test_every_figure_is_there_and_not_empty(open_tab):
    tab = open_tab()
    charts = tab.page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("figure.chart")].map((f) => {
            const box = f.querySelector("svg").getBBox();
            return [f.id, [box.width, box.height, f.querySelectorAll("svg path").length,
                           f.querySelectorAll("tbody tr").length]];
        }))"""
    )
    names = {name.removesuffix("_small_cnn") for name in charts}
    assert names == {
        *("accuracy_speed", "training_loss", "test_accuracy", "every_seed"),
        *("sharpness", "memory", "landscape_line"),
    }
    for width, height, paths, rows in charts.values():
        assert width > 250 and height > 150 and paths > 10 and rows >= 3
    tab.pictures()
    colours = tab.page.evaluate(
        """() => [...document.querySelectorAll("canvas")].map((canvas) => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.data.buffer)).size;
        })"""
    )
    assert len(colours) == 4 and min(colours) > 200
    contours = tab.page.evaluate(
        "() => [...document.querySelectorAll('.contour svg')]"
        ".map((svg) => svg.querySelectorAll('path').length)"
    )
    assert len(contours) == 4 and min(contours) > 10


def test_the_tables_numbers_are_the_summarys(open_tab, comparison):
    tab = open_tab()
    shown = tab.page.evaluate(
        """() => [...document.querySelectorAll(".results tbody tr")].map((row) => [
            row.dataset.method,
            Object.fromEntries([...row.querySelectorAll("td")].map(
                (cell) => [cell.dataset.name, [cell.dataset.value, cell.innerText]]))])"""
    )
    rows = json.loads((comparison / "summary.json").read_text())["rows"]
    assert [name for name, _ in shown] == [row["method"] for row in rows]
    for (_, cells), row in zip(shown, rows, strict=True):
        value, text = cells["accuracy"]
        assert float(value) == row["accuracy"]["mean"]
        assert text.startswith(f"{row['accuracy']['mean']:.2f}")
        assert f"{row['accuracy']['low']:.2f} to {row['accuracy']['high']:.2f}" in text
        assert cells["images_per_second"][1] == f"{row['images_per_second']:,.0f}"
        assert cells["speed"][1] == f"{row['speed']:.0%}"
        assert cells["sharpness"][1] == f"{row['sharpness']:.4f}"


def test_turning_one_landscape_turns_all(open_tab):
    tab = open_tab()
    before = tab.pictures()
    assert before[0] == before[2] and len(set(before)) == 3  # base and saf are the same
    box = tab.page.locator("canvas").nth(1).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 60, y + 20, steps=4)
    tab.page.mouse.up()
    after = tab.pictures()
    assert all(new != old for new, old in zip(after, before, strict=True))
    assert after[0] == after[2]
    tab.page.locator("canvas").nth(3).press("ArrowLeft")
    assert all(new != old for new, old in zip(tab.pictures(), after, strict=True))
    tab.page.get_by_role("button", name="Reset").click()
    assert tab.pictures() == before
    tab.page.locator(".cut").fill("30")
    assert all(new != old for new, old in zip(tab.pictures(), before, strict=True))


def test_the_button_sets_them_going_and_stops_them(open_tab):
    tab = open_tab()
    before = tab.pictures()
    button = tab.page.get_by_role("button", name="Rotate")
    button.click()
    tab.page.wait_for_timeout(300)
    button.click()
    assert all(new != old for new, old in zip(tab.pictures(), before, strict=True))


def test_numbers_under_the_pointer(open_tab):
    tab = open_tab()
    chart = tab.page.locator("#training_loss_small_cnn")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".drawing").bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] * 0.16, box["y"] + box["height"] / 2)
    tip = tab.page.locator(".tip")
    rows = chart.locator("tbody tr").first.locator("td").all_text_contents()
    assert tip.inner_text().split() == ["epoch", "0", *chain(*zip(METHODS, rows[1:], strict=True))]
    tab.page.mouse.move(5, 5)
    assert tip.is_hidden()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_overflows_a_narrow_screen(open_tab, width):
    tab = open_tab(width=width)
    tab.pictures()
    assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_labels_of_landscapes_are_not_cut_off(open_tab):
    tab = open_tab(width=320)
    tab.pictures()
    tab.page.evaluate(
        """() => {
            window.written = [];
            const pen = CanvasRenderingContext2D.prototype, write = pen.fillText;
            pen.fillText = function (text, x, y) {
                written.push([x, x + this.measureText(text).width - this.canvas.width]);
                write.call(this, text, x, y);
            };
        }"""
    )
    for _ in range(8):
        tab.page.locator("canvas").first.press("ArrowLeft")
        tab.page.wait_for_timeout(40)
    tab.pictures()
    written = tab.page.evaluate("written")
    assert len(written) >= 5
    assert all(left >= 0 and over < 0.5 for left, over in written)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_in_light_and_in_dark(open_tab, scheme):
    tab = open_tab(color_scheme=scheme)
    ratios = tab.page.evaluate(
        """() => {
            const style = getComputedStyle(document.documentElement);
            const light = (name) => {
                const hex = style.getPropertyValue(name).trim().slice(1);
                const parts = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
                    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
            };
            const ground = light("--card");
            const names = ["--ink", "--muted", "--accent", "--good", "--bad",
                           ...Array.from({ length: 8 }, (_, i) => `--c${i}`)];
            return Object.fromEntries(names.map((name) => {
                const [low, high] = [ground, light(name)].sort((a, b) => a - b);
                return [name, (high + 0.05) / (low + 0.05)];
            }));
        }"""
    )
    assert min(ratios.values()) > 4.5, ratios
    assert ratios["--ink"] > 12
    drawn = tab.page.evaluate(
        """getComputedStyle(document.querySelector("figure.chart svg text")).fill"""
    )
    assert drawn == {"light": "rgb(93, 103, 110)", "dark": "rgb(154, 165, 171)"}[scheme]


def test_methods_differ_without_colour(open_tab):
    dashes = open_tab().page.evaluate(
        """() => [...document.querySelectorAll("#training_loss_small_cnn svg path")]
            .map((path) => path.style).filter((style) => style.stroke.startsWith("var(--c"))
            .map((style) => [style.stroke, style.strokeDasharray])"""
    )
    by_colour = {}
    for colour, dash in dashes:
        by_colour.setdefault(colour, set()).add(dash)
    assert len(by_colour) == 4
    assert len({tuple(sorted(found)) for found in by_colour.values()}) == 4


def test_it_prints(open_tab):
    tab = open_tab(color_scheme="dark")
    tab.page.emulate_media(media="print")
    ground = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert "Drag" not in tab.page.locator(".controls").inner_text()
    tab.page.emulate_media(media=None)
    printed = tab.page.pdf(format="A4")
    assert printed.startswith(b"%PDF") and 1 <= printed.count(b"/Type /Page\n") <= 6
    assert b"/Subtype /Image" in printed  # the landscapes
    assert tab.page.locator("details[open]").count() == 0


def test_a_page_without_landscapes_says_how_to_get_them(open_tab, tmp_path):
    folder = write_comparison(tmp_path / "c", methods=("base",), seeds=1)
    write_page(read_settings([folder]), folder / "report.html", "")
    tab = open_tab(folder)
    assert tab.page.locator("canvas").count() == 0
    said = tab.page.locator(".commands").inner_text()
    assert f"saltflat landscape {folder / 'base' / 'seed0'}" in said and "--track_sharpness" in said
