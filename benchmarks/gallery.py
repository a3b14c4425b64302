"""Make docs/gallery.md and its pictures, and the README's picture of the page, from recorded runs.

python benchmarks/gallery.py runs/demo [runs/other ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from playwright.sync_api import sync_playwright

from saltflat.report.page import write_page
from saltflat.report.pictures import (
    accuracy_against_speed,
    indices_of,
    pictures_of,
    render,
)
from saltflat.report.records import Setting, read_settings
from saltflat.report.style import PAPER
from saltflat.report.surfaces import contours_in_a_row, surfaces_in_a_row, surfaces_of

DOCS = Path(__file__).parent.parent / "docs"


def figures_of(setting: Setting) -> dict[str, Figure]:
    """A comparison's pictures by what they show."""
    indices = indices_of([setting])
    first = accuracy_against_speed([setting], indices)
    pictures = [*([first] if first else []), *pictures_of(setting, indices)]
    figures = {picture.title: render(picture, PAPER) for picture in pictures}
    if (surfaces := surfaces_of(setting)) is not None:
        figures["Loss landscapes"] = surfaces_in_a_row(surfaces)
        figures["Contours"] = contours_in_a_row(surfaces)
    return figures


def section(folder: Path, images: Path) -> list[str]:
    """A comparison's part of the gallery; its pictures are written."""
    (setting,) = read_settings([folder])
    surfaces = surfaces_of(setting)
    made, data = setting.provenance, next(setting.runs).config["data"]
    name = Path(data["name"]).stem
    lines = [
        f"## {name}, {setting.name}",
        "",
        f"{made['hardware']}; {made['versions']}; {made['date']}; seeds: "
        f"{len(setting.methods[0].runs)}.",
        "",
        "```bash",
        made["command"],
        *([] if surfaces is None else surfaces.commands),
        "```",
        "",
        *(f"- {sentence}" for sentence in setting.verdicts),
        "",
    ]
    for title, figure in figures_of(setting).items():
        path = images / f"{name}_{setting.name}_{title.lower().replace(' ', '_')}.png"
        figure.savefig(path, dpi=150)
        lines.append(f"![{title}]({path.relative_to(DOCS).as_posix()})")
    return [*lines, ""]


def photograph(folder: Path, path: Path, browser: str) -> None:
    """The page's beginning and its landscapes, in one picture of few colours."""
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        page = Path(scratch) / "report.html"
        write_page(read_settings([folder]), page, f"saltflat report {folder}")
        window = playwright.chromium.launch(executable_path=browser).new_page(
            viewport={"width": 1180, "height": 4000}
        )
        window.goto(page.as_uri())
        window.wait_for_timeout(2000)
        bottom = window.evaluate("document.querySelector('.legend').getBoundingClientRect().bottom")
        top = window.evaluate("document.querySelector('.landscapes').getBoundingClientRect().top")
        charts = window.evaluate("document.querySelector('.chart').getBoundingClientRect().bottom")
        shot = Path(scratch) / "shot.png"
        window.screenshot(path=str(shot))
        with Image.open(shot) as image:
            above = image.crop((0, 0, image.width, int(charts) + 14))
            below = image.crop((0, int(top) - 60, image.width, int(bottom) + 24))
        both = Image.new("RGB", (above.width, above.height + below.height))
        both.paste(above, (0, 0))
        both.paste(below, (0, above.height))
        both.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="comparisons with landscapes")
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or "google-chrome"
    parser.add_argument("--browser", default=browser)
    options = parser.parse_args()
    images = DOCS / "images"
    images.mkdir(exist_ok=True)
    lines = [
        "# Gallery",
        "",
        "Made by `python benchmarks/gallery.py "
        + " ".join(f"runs/{folder.name}" for folder in options.folders)
        + "` from the runs of the commands below. `saltflat report` makes the same, and a page to",
        "turn the landscapes on, of your own runs: [the guide](guides/report.md).",
        "",
    ]
    for folder in options.folders:
        lines += section(folder, images)
    (DOCS / "gallery.md").write_text("\n".join(lines).rstrip() + "\n")
    photograph(options.folders[0], images / "report.png", options.browser)


if __name__ == "__main__":
    main()
