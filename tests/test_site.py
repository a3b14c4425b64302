"""The site: built without a warning, whole, and without another server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import saltflat
import saltflat.landscape
import saltflat.sharpness
import saltflat.train

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return folder


def test_every_page_is_there_and_the_repositorys_files_that_pages_link_to(site):
    for page in ROOT.glob("docs/**/*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / ("" if name.name == "index" else name) / "index.html").is_file()
    assert (site / "repository" / "examples" / "quickstart.ipynb").is_file()
    assert "repository/examples/quickstart.ipynb" in (site / "index.html").read_text()
    readme = (site / "repository" / "index.html").read_text()
    assert 'href="../guides/memory/"' in readme  # docs/guides/memory.md in the README


def test_every_public_name_is_explained(site):
    pages = "".join(page.read_text() for page in site.glob("api/*/index.html"))
    explained = set(re.findall(r'id="(saltflat[\w.]*)"', pages))
    modules = (saltflat, saltflat.sam, saltflat.sharpness, saltflat.landscape, saltflat.train)
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert public - {"saltflat.sam"} <= explained
    assert "<blockquote>" not in pages  # of a prompt that was taken for a quotation
    assert ".. math" not in pages


def test_the_site_asks_no_other_server(site):
    for page in site.glob("**/*.html"):
        text = page.read_text()
        assert not re.search(r'<(?:script|img)[^>]* src="(?:https?:)?//', text), page
        assert not re.search(
            r'<link[^>]* rel="(?:stylesheet|preconnect)"[^>]*"(?:https?:)?//', text
        )
