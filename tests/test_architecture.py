"""Who may import whom: the arrows between the rooms, read from the source."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import saltflat

SOURCE = Path(saltflat.__file__).parent

ARROWS = {
    "core": set(),
    "memory": {"core"},
    "teacher": {"core"},
    "terms": {"memory", "teacher", "core"},
    "sam": {"core"},
    "sharpness": {"core"},
    "landscape": {"teacher", "core"},
    "integrations": {"terms", "sam", "sharpness", "memory", "core"},
    "train": {"terms", "sam", "sharpness", "memory", "teacher", "core", "__version__"},
    "report": {"landscape", "core"},
    "cli": {"report", "train", "landscape"},
    "__init__": {"terms", "memory", "teacher", "sam", "core"},
    "__main__": {"cli"},
}
"""From each room to those it may import beside itself."""

NARROW = {("landscape", "teacher"): "teacher.fold", ("integrations", "memory"): "memory.indexing"}
"""Arrows that reach one file of a room."""

CORE = {
    *("__init__", "batchnorm", "checks", "cuda_graph", "distributed", "perturb", "registry"),
    "statistics",
}
"""A closed list: what several rooms share, and no room owns."""

EXTRAS = {
    "core": {"scipy"},
    "integrations": {"accelerate", "lightning", "timm", "torchmetrics", "transformers"},
    "train": {"datasets", "rich", "safetensors", "scipy", "sklearn", "timm", "torchvision"},
    "report": {"jinja2", "markupsafe", "matplotlib", "mpl_toolkits"},
    "cli": {"jinja2", "jsonargparse", "matplotlib", "rich"},
}
"""What rooms may import beside torch, numpy and the standard library."""


def imports(path):
    """Every module that a file imports, by its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            if node.module == "saltflat":
                yield from (f"saltflat.{alias.name}" for alias in node.names)
            else:
                yield node.module


def room(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def test_every_room_imports_only_what_it_may():
    files = list(SOURCE.rglob("*.py"))
    assert {room(path) for path in files} == ARROWS.keys()
    for path in files:
        own = room(path)
        for imported in imports(path):
            package, _, rest = imported.partition(".")
            if package == "saltflat":
                target = rest.partition(".")[0]
                assert target in ARROWS[own] | {own}, f"{path.name} -> {imported}"
                assert rest.startswith(NARROW.get((own, target), "")), f"{path.name} -> {imported}"
            else:
                known = sys.stdlib_module_names | {"torch", "numpy"} | EXTRAS.get(own, set())
                assert package in known, f"{path.name} -> {imported}"


def test_arrows_go_one_way():
    def reach(start, seen=()):
        assert start not in seen, f"a circle: {' -> '.join((*seen, start))}"
        for target in ARROWS.get(start, ()):
            reach(target, (*seen, start))

    for start in ARROWS:
        reach(start)


def test_core_is_a_closed_list():
    assert {path.stem for path in (SOURCE / "core").glob("*.py")} == CORE


def test_the_root_holds_no_logic():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}
    for node in ast.parse((SOURCE / "__init__.py").read_text()).body:
        assert isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign), node.lineno


@pytest.mark.parametrize("word", ["is_current_stream_capturing", "is_compiling", "CUDAGraph"])
def test_only_one_file_knows_of_cuda_graphs(word):
    found = {path.name for path in SOURCE.rglob("*.py") if word in path.read_text()}
    assert found == {"cuda_graph.py"}


@pytest.mark.parametrize("folder", ["integrations", "train"])
def test_loops_and_adapters_never_ask_for_a_term_by_its_class(folder):
    for path in (SOURCE / folder).rglob("*.py"):
        for call in re.findall(r"isinstance\([^)]*\)", path.read_text()):
            assert not re.search(r"\b(SAF|MESA|Shuffled|Uniform)\b", call), f"{path.name}: {call}"


def test_every_import_is_a_declared_dependency():
    """Of the package or of an extra, or of one that these bring along."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {
        re.match(r"[\w-]+", one)[0].lower() for requirements in lists for one in requirements
    }
    declared |= {"markupsafe", "torchmetrics"}  # jinja2's and lightning's own
    of_package = packages_distributions()
    for path in SOURCE.rglob("*.py"):
        found = {name.partition(".")[0] for name in imports(path)} - {"saltflat"}
        for package in found - sys.stdlib_module_names:
            names = {name.lower() for name in of_package[package]}
            assert names & declared, f"{path.name} -> {package}"


def test_importing_saltflat_loads_torch_and_numpy_only():
    script = "import sys, torch; before = set(sys.modules); import saltflat; " + (
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = set(result.stdout.split()) - set(sys.stdlib_module_names)
    assert loaded <= {"saltflat", "torch", "numpy"}
    assert "saltflat" in loaded


def test_an_adapter_without_its_framework_names_the_command_that_installs_it():
    adapters = {path.stem for path in (SOURCE / "integrations").glob("[a-z]*.py")} - {"hooks"}
    assert adapters == {"accelerate", "lightning", "timm", "transformers"}
    script = """
import importlib, sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it were not installed
    try:
        importlib.import_module(f"saltflat.integrations.{name}")
    except ImportError as error:
        print(error)
"""
    command = [sys.executable, "-c", script, *adapters]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    for name in adapters:
        assert f"missing: pip install 'saltflat[{name}]'" in said
