"""The docstrings' words for mkdocstrings: an example is one of its sections, a formula a block.

A formula is shown as its LaTeX: to set it would take a script from another server.
"""

from __future__ import annotations

import re
from textwrap import dedent, indent
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
FORMULA = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*)", re.MULTILINE)


class Docstrings(Extension):
    """Changes every docstring before it is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = FORMULA.sub(_block, text)


def _block(formula: re.Match[str]) -> str:
    first, *others = formula[2].split("\n")
    lines = "\n".join([first.strip(), indent(dedent("\n".join(others)), "  ")]).strip()
    return indent(f"```latex\n{lines}\n```", formula[1])
