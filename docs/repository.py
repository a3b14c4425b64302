"""Files of the repository in the site, so that a link to one is right there and on GitHub.

Pages link as files of a repository do, relative to themselves: `../README.md`,
`../benchmarks/results/x.md`. Whatever of it lies outside docs/ is put into the site under
repository/, and so is what that links to; links are changed to lead there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to, and what the project's own pages are."""
    waiting = [DOCS / page.src_uri for page in files.documentation_pages()]
    waiting += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if DOCS not in path.parents:
            files.append(File.generated(config, _in_site(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            found = (_target(path, link) for link in LINK.findall(path.read_text()))
            waiting += [target for target in found if target is not None]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where the files are in the site."""
    path = Path(page.file.abs_src_path)

    def moved(link: re.Match[str]) -> str:
        target = _target(path, link[0])
        if target is None:
            return link[0]  # an address, or a link that mkdocs will complain of
        return posixpath.relpath(_in_site(target), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)


def _target(path: Path, link: str) -> Path | None:
    target = (path.parent / link).resolve()
    return target if ROOT in target.parents and target.is_file() else None


def _in_site(path: Path) -> str:
    inside = DOCS in path.parents
    name = path.relative_to(DOCS if inside else ROOT).as_posix()
    return name if inside else f"repository/{name}"
