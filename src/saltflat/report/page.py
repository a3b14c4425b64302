"""One page of HTML with all in it: nothing is fetched when it is read."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from saltflat.landscape import Surface
from saltflat.landscape.scale import Scale
from saltflat.report.pictures import (
    Picture,
    accuracy_against_speed,
    indices_of,
    pictures_of,
    render,
)
from saltflat.report.records import Setting, tracked
from saltflat.report.style import PAGE, with_variables
from saltflat.report.surfaces import (
    Surfaces,
    color_stops,
    contours_alone,
    packed,
    planes,
    surfaces_of,
)
from saltflat.report.table import columns, finding, options


@dataclass(frozen=True)
class Inline:
    """A picture as it stands in the page."""

    picture: Picture
    svg: Markup
    box: str
    """Left, right, bottom and top of the axes, as shares of the picture."""
    limits: str
    """Of the horizontal axis."""


def write_page(settings: Sequence[Setting], path: Path, command: str) -> Path:
    """Write the page of some runs.

    Args:
        settings: What `read_settings` has read.
        path: The file.
        command: The one that makes this page, to stand in it.

    Returns:
        The file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(list(settings), command), encoding="utf-8")
    return path


def page(settings: list[Setting], command: str) -> str:
    """The page's text."""
    environment = Environment(
        loader=PackageLoader("saltflat.report", "template"),
        autoescape=True,  # nothing that a run is called can become part of the page
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    indices = indices_of(settings)
    first = accuracy_against_speed(settings, indices)
    sections = []
    for number, setting in enumerate(settings):
        surfaces = surfaces_of(setting)
        sections.append(
            {
                "id": f"setting{number}",
                "setting": setting,
                "columns": columns(setting),
                "findings": [finding(method) for method in setting.methods],
                "pictures": [inline(picture) for picture in pictures_of(setting, indices)],
                "notes": planes(setting)[1],
                "surfaces": None if surfaces is None else _cards(surfaces, setting.name),
            }
        )
    return environment.get_template("page.html").render(
        title=_title(settings),
        subtitle=_subtitle(settings),
        indices=indices,
        first=None if first is None else inline(first),
        sections=sections,
        options=options(settings),
        command=command,
        source=lambda name: Markup(_source(name)),
        tracked=tracked(settings),
    )


def _source(name: str) -> str:
    return (Path(__file__).parent / "template" / name).read_text(encoding="utf-8")


def _title(settings: list[Setting]) -> str:
    labels = list(indices_of(settings))
    shown = labels if len(labels) < 7 else [*labels[:5], f"{len(labels) - 5} more"]
    data = Path(next(settings[0].runs).config["data"]["name"]).stem
    return f"{', '.join(shown)} on {data}"


def _subtitle(settings: list[Setting]) -> str:
    config = next(settings[0].runs).config
    data = config["data"]
    size = f"{data['train_size']:,} training images" if data.get("train_size") else ""
    noise = f"{data['label_noise']:.0%} of the training labels wrong" if data["label_noise"] else ""
    epochs = sorted({run.config["epochs"] for setting in settings for run in setting.runs})
    seeds = sorted({len(method.runs) for setting in settings for method in setting.methods})
    said = [
        ", ".join(setting.name for setting in settings),
        _range(epochs, "epoch"),
        _range(seeds, "seed"),
        size,
        noise,
    ]
    return " · ".join(part for part in said if part)


def _range(values: list[int], word: str) -> str:
    number = str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
    return f"{number} {word}{'' if values == [1] else 's'}"


def inline(picture: Picture) -> Inline:
    """Draw a picture as SVG whose colours are the page's variables."""
    figure = render(picture, PAGE)
    svg = _svg(figure, picture.name, picture.title)
    axes = figure.axes[0]
    extent = axes.get_position()
    box = " ".join(f"{v:.4f}" for v in (extent.x0, extent.x1, extent.y0, extent.y1))
    return Inline(picture, svg, box, " ".join(f"{limit:g}" for limit in axes.get_xlim()))


def _svg(figure: Figure, salt: str, label: str) -> Markup:
    """A figure as an element: no width of its own, and no name that another figure has too."""
    file = io.StringIO()
    with rc_context({**PAGE.settings(salt), "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
    text = re.sub(r'^(<svg[^>]*?) width="[^"]*"', r"\1", text)
    text = re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r"font: (?:\w+ )?[\d.]+px[^;\"]*", _font, text)
    text = re.sub(r"\n\s*", "\n", text)
    named = f'<svg role="img" aria-label="{Markup.escape(label)}"'
    return Markup(with_variables(text).replace("<svg", named, 1))


def _font(found: re.Match[str]) -> str:
    """The page's own font, in the picture's size and weight."""
    size = re.search(r"([\d.]+)px", found[0])
    weight = "font-weight: 600; " if re.search(r"\b(bold|700)\b", found[0]) else ""
    return f"{weight}font-size: {size[1] if size else 11}px"


def _cards(surfaces: Surfaces, name: str) -> dict[str, Any]:
    """What the page shows of landscapes: a surface to turn and contours for each."""
    return {
        "cards": [
            {"label": label, "contour": _contour(label, one, surfaces.scale, name)}
            for label, one in surfaces.shown.items()
        ],
        "commands": surfaces.commands,
        "data": packed(surfaces),
        "stops": ["rgb({},{},{})".format(*color) for color in color_stops(9)],
    }


def _contour(label: str, surface: Surface, scale: Scale, name: str) -> Markup:
    salt = f"{name}_{label}"
    return _svg(contours_alone(surface, scale, PAGE, salt), salt, f"Contours of {label}")
