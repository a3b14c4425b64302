"""The docstrings' formulas as blocks of their LaTeX: to set them would take a script of another server's."""

from __future__ import annotations

import re
from textwrap import dedent, indent
from typing import Any

from griffe import Extension

FORMULA = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*)", re.MULTILINE)


class Formulas(Extension):
    """Make each `.. math::` a fenced block."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = FORMULA.sub(_block, obj.docstring.value)


def _block(formula: re.Match[str]) -> str:
    first, *others = formula[2].split("\n")
    lines = "\n".join([first.strip(), indent(dedent("\n".join(others)), "  ")]).strip()
    return indent(f"```latex\n{lines}\n```", formula[1])
