import os
import subprocess
import sys
from pathlib import Path


def test_the_gpu_kernels_compute_what_pytorch_does():
    script = Path(__file__).with_name("fused_by_interpreter.py")
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "all is as it should be\n", result.stderr
