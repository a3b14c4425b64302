"""The wheel and the sdist: all of the package is in them, and it works where it is installed."""

import os
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from records import write_comparison

import saltflat

ROOT = Path(__file__).parent.parent


def do(*command, cwd=ROOT):
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source, kind, out):
    """A wheel or sdist of a source tree, by its build backend."""
    do(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=source)
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_and_no_more(wheel):
    source = ROOT / "src"
    files = [path for path in source.glob("saltflat/**/*") if path.is_file()]
    expected = {path.relative_to(source).as_posix() for path in files if path.suffix != ".pyc"}
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert found == expected
    assert {"saltflat/py.typed", "saltflat/report/template/page.html"} <= found


def test_the_sdist_makes_the_same_wheel(wheel, tmp_path):
    sdist = build(ROOT, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"saltflat-{saltflat.__version__}"
    for name in ("LICENSE", "README.md", "Makefile", "tests/test_package.py", "docs/index.md"):
        assert (unpacked / name).is_file(), name
    assert contents(build(unpacked, "wheel", tmp_path)) == contents(wheel)


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    home = tmp_path / "venv"
    do(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    do(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # What it depends on is this environment's, after its own packages: a copy of torch is large.
    own = Path(do(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    (own / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    say = "import saltflat; print(saltflat.__file__, saltflat.__version__)"
    place, version = do(python, "-c", say, cwd=tmp_path).split()
    assert own in Path(place).parents and version == saltflat.__version__
    command = home / "bin" / "saltflat"
    assert "compare" in do(command, "--help", cwd=tmp_path)
    write_comparison(tmp_path / "compare")
    do(command, "report", "compare", "-o", "report.html", cwd=tmp_path)
    assert "<svg" in (tmp_path / "report.html").read_text()
