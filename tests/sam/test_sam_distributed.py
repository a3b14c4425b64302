import subprocess
import sys
from pathlib import Path

import pytest
from problems import WRAPPERS

DENSE = [name for name, wrapper in WRAPPERS.items() if not wrapper.per_row]


@pytest.mark.parametrize(
    ("case", "findings"),
    [
        ("replicated", len(WRAPPERS) + len(DENSE) + 7),
        # On torch 2.6 fully_shard does not run on the CPU.
        pytest.param("sharded", len(DENSE), marks=pytest.mark.newest),
    ],
)
def test_the_sam_family_on_two_ranks(case, findings, tmp_path):
    """Replicas stay equal bit for bit, and a synchronised climb is that of the whole batch."""
    script = Path(__file__).parents[1] / "sam_on_two_ranks.py"
    command = [sys.executable, str(script), str(tmp_path / "store"), case]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        said = (tmp_path / f"store.{rank}").read_text().splitlines()
        assert len(said) == findings
        assert [line for line in said if not line.endswith(": True")] == []
