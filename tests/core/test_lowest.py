"""`make test-lowest` runs on the lowest versions that pyproject declares."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_constraints_pin_the_declared_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["sharpness"]
    bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", one).groups() for one in declared)
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {"torch", "numpy"} <= set(bounds)
    # 2.6 is pinned as 2.6.0.
    assert {name: pins[name].removesuffix(".0") for name in bounds} == bounds
