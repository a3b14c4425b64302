"""Who may import whom: the arrows of the design, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import saltflat

SOURCE = Path(saltflat.__file__).parent

ARROWS = {
    "trajectory": set(),
    "codecs": set(),
    "indexed": set(),
    "teacher": set(),
    "_mapped": set(),
    "_term": {"trajectory"},
    "memory": {"codecs", "_mapped"},
    "saf": {"_term", "memory", "codecs"},
    "mesa": {"_term", "teacher"},
    "__init__": {"trajectory", "saf", "mesa", "memory", "teacher", "indexed"},
}
THIRD_PARTIES = {"torch", "numpy"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield node.module


def test_every_module_imports_only_what_it_may():
    modules = {path.stem: path for path in SOURCE.glob("*.py")}
    assert modules.keys() == ARROWS.keys()
    for name, path in modules.items():
        for imported in imports(path):
            package, _, rest = imported.partition(".")
            if package == "saltflat":
                assert rest.partition(".")[0] in ARROWS[name], f"{name} -> {imported}"
            else:
                assert package in sys.stdlib_module_names | THIRD_PARTIES, f"{name} -> {imported}"


def test_importing_saltflat_loads_torch_and_numpy_only():
    script = "import sys, torch; before = set(sys.modules); import saltflat; " + (
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = set(result.stdout.split()) - set(sys.stdlib_module_names)
    assert loaded <= {"saltflat", "torch", "numpy"}
    assert "saltflat" in loaded


def test_every_public_name_is_there_and_documented():
    for name in saltflat.__all__:
        assert getattr(saltflat, name).__doc__
