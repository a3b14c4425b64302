import subprocess
import sys
from pathlib import Path


def test_every_framework_on_two_processes(tmp_path):
    """Equal to one process, and to the bit after a checkpoint."""
    script = Path(__file__).with_name("integrations_on_two_ranks.py")
    command = [sys.executable, str(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    passed = result.stdout.split()
    assert {"lightning", "transformers", "accelerate", "timm"} <= set(passed), result.stderr
    assert result.returncode == 0
