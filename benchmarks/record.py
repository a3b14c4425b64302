"""How a measurement is written down: a table and raw JSON, with hardware, versions and command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from saltflat.train.files import markdown
from saltflat.train.provenance import command, provenance

RESULTS = Path(__file__).parent / "results"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    return markdown([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])


def write(
    theme: str,
    title: str,
    sections: dict[str, list[dict[str, Any]]],
    out: Path,
    raw: Any = None,
) -> None:
    """Print the tables; write `<theme>_<hardware>_<date>.md` and, with the raw data, `.json`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    facts = provenance(command("python", script, *sys.argv[1:]), device)
    body = [f"# {title}", *(f"- {name}: `{value}`" for name, value in facts.items())]
    for heading, rows in sections.items():
        body += ["", heading, "", table(rows)]
    text = "\n".join(body) + "\n"
    print(text)
    machine = "cpu" if device.type == "cpu" else facts["hardware"].split()[-1].lower()
    stem = f"{theme}_{machine}_{facts['date']}"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem}.md").write_text(text)
    record = {**facts, "tables": sections, **({} if raw is None else {"raw": raw})}
    (out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")


def merge(theme: str, machine: str, date: str, out: Path) -> None:
    """Make one `<theme>_<machine>_<date>` of those that were measured part by part."""
    stem = out / f"{theme}_{machine}_{date}"
    parts = sorted(out.glob(f"{theme}_*_{machine}_{date}.json"))
    records = [json.loads(part.read_text()) for part in parts]
    body = [f"# {theme.capitalize()}", f"- hardware: `{records[0]['hardware']}`, {date}"]
    for one in records:
        body += ["", f"`{one['command']}` ({one['versions']})"]
        for heading, rows in one["tables"].items():
            body += ["", heading, "", table(rows)]
    stem.with_suffix(".md").write_text("\n".join(body) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n")
    for part in parts:
        part.unlink()
        part.with_suffix(".md").unlink()
