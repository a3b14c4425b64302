"""Who may import whom: the arrows of the design, read from the source."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import saltflat

SOURCE = Path(saltflat.__file__).parent

ARROWS = {
    "trajectory": set(),
    "codecs": set(),
    "indexed": set(),
    "exchange": {"core"},
    "sampler": {"core", "exchange"},
    "teacher": {"core", "_folded", "_plan"},
    "_plan": {"_average", "core"},
    "core": set(),
    "_mapped": set(),
    "_clock": set(),
    "_sources": set(),
    "_kernels": set(),
    "_launch": set(),
    "_average": {"_kernels", "_launch"},
    "_traced": set(),
    "_convolution": {"_launch", "_kernels", "_traced"},
    "_folded": {"core", "_convolution", "_traced"},
    "_gather": set(),
    "_staging": set(),
    "_fused": {"_kernels", "_sources"},
    "_term": {"_launch", "_clock", "_fused", "_sources", "trajectory"},
    "_rings": {"_clock"},
    "memory": {"_gather", "_mapped", "_rings", "_sources", "_staging", "codecs"},
    "_sharded": {"core", "_sources", "exchange", "memory"},
    "saf": {"core", "_sharded", "_term", "exchange", "memory"},
    "dialects": set(),
    "_match": {"_fused", "core"},
    "mesa": {"core", "_match", "_sources", "_term", "teacher"},
    "sam": {"core"},
    "sharpness": {"core"},
    "landscape": {"core", "_folded"},
    "train": {
        "core",
        "_term",
        "codecs",
        "saf",
        "mesa",
        "sam",
        "teacher",
        "indexed",
        "sharpness",
        "__version__",
    },
    "integrations": {"indexed", "mesa", "saf", "sharpness"},
    "report": {"landscape"},
    "cli": {"train", "landscape", "report"},
    "__main__": {"cli"},
    "__init__": {
        "trajectory",
        "saf",
        "mesa",
        "memory",
        "teacher",
        "indexed",
        "sampler",
        "sam",
        "dialects",
    },
}
"""From each module, or package, to those it may import beside itself."""

THIRD_PARTIES = {"torch", "numpy"}
EXTRAS = {
    "_fused.py": {"triton"},
    "_kernels.py": {"triton"},
    "commands.py": {"jsonargparse", "rich"},
    "landscapes.py": {"jsonargparse"},
    "checkpoint.py": {"safetensors"},
    "figures.py": {"matplotlib"},
    "plot.py": {"matplotlib", "mpl_toolkits"},
    "pictures.py": {"matplotlib"},
    "paper.py": {"matplotlib"},
    "surfaces.py": {"matplotlib"},
    "page.py": {"jinja2", "markupsafe", "matplotlib"},
    "__init__.py": {"jinja2", "jsonargparse", "matplotlib"},
    "data.py": {"datasets", "sklearn", "torchvision"},
    "augment.py": {"torchvision"},
    "log.py": {"rich"},
    "models.py": {"timm"},
    "statistics.py": {"scipy"},
    "lightning.py": {"lightning"},
    "_lightning.py": {"lightning"},
    "_lightning_sharpness.py": {"lightning", "torchmetrics"},
    "_lightning_step.py": {"lightning"},
    "transformers.py": {"transformers"},
    "_transformers.py": {"transformers"},
    "accelerate.py": {"accelerate"},
    "timm.py": {"timm"},
}
"""What single files may import beside these."""


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


def unit(path):
    """The module or package of the design that a file belongs to."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def test_every_module_imports_only_what_it_may():
    files = list(SOURCE.rglob("*.py"))
    assert {unit(path) for path in files} == ARROWS.keys()
    for path in files:
        for imported in imports(path):
            package, _, rest = imported.partition(".")
            if package == "saltflat":
                target = rest.partition(".")[0]
                allowed = ARROWS[unit(path)] | {unit(path)}
                assert target in allowed, f"{path.name} -> {imported}"
            else:
                known = sys.stdlib_module_names | THIRD_PARTIES | EXTRAS.get(path.name, set())
                assert package in known, f"{path.name} -> {imported}"


def test_every_import_is_a_declared_dependency():
    """Of the package or of an extra, or of one that these bring along."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {
        re.match(r"[\w-]+", one)[0].lower() for requirements in lists for one in requirements
    }
    declared |= {"triton", "markupsafe", "torchmetrics"}  # torch's, jinja2's and lightning's own
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
    adapters = [path.stem for path in (SOURCE / "integrations").glob("[a-z]*.py")]
    assert sorted(adapters) == ["accelerate", "lightning", "timm", "transformers"]
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


def test_adapters_are_thin():
    for path in (SOURCE / "integrations").glob("*.py"):
        assert len(path.read_text().splitlines()) < 150, path.name


def test_every_public_name_is_there_and_documented():
    for module in (saltflat, saltflat.sam):
        for name in module.__all__:
            assert getattr(module, name).__doc__
