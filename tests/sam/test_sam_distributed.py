import subprocess
import sys
from pathlib import Path

from problems import WRAPPERS


def test_the_sam_family_on_two_ranks(tmp_path):
    """Replicas stay equal bit for bit, and a synchronised climb is that of the whole batch."""
    script = Path(__file__).parents[1] / "sam_on_two_ranks.py"
    command = [sys.executable, str(script), str(tmp_path / "store")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    per_rank = len(WRAPPERS) + 2 * sum(not w.per_row for w in WRAPPERS.values()) + 7
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        said = (tmp_path / f"store.{rank}").read_text().splitlines()
        assert len(said) == per_rank
        assert [line for line in said if not line.endswith(": True")] == []
