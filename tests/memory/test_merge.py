"""Each scenario of merge_on_ranks.py, on two and on three gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory.merge_on_ranks import SCENARIOS, STOPS


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory):
    """What went wrong, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("merge_on_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(request.param), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    found = {"stderr": done.stderr}
    for file in folder.glob("results*.json"):
        found |= json.loads(file.read_text())
    return found


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_on_ranks(results, scenario):
    assert results.get(scenario, results["stderr"]) == ""


@pytest.mark.parametrize("how", STOPS)
def test_a_rank_that_does_not_come(results, how):
    assert results.get(how, results["stderr"]) == ""
