import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from saltflat import _kernels
from saltflat._match import MATCHES


def test_the_gpu_kernels_compute_what_pytorch_does():
    script = Path(__file__).with_name("fused_by_interpreter.py")
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "all is as it should be\n", result.stderr


def compiled(kernel, types, **constants):
    """What is made of a kernel for an H100 or H200, which need not be there."""
    names = [*inspect.signature(kernel.fn).parameters]
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: signature[name] for name in names}, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm


@pytest.mark.parametrize("outputs", ["*fp32", "*bf16"])
@pytest.mark.parametrize("mode", ["given", "ring", "staged"])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_a_gpu(mode, outputs):
    """The interpreter takes more than the compiler does."""
    table, storage = {
        "given": (outputs, "float32"),
        "ring": ("*fp16", "float16"),
        "staged": ("*u8", "uint8"),
    }[mode]
    pointers = [outputs, table, "*i1" if mode == "staged" else "*i32", "*i64", "*i64", "*fp32"]
    sizes, constants = ["i32"] * 4, {"BLOCK": 128, "STORAGE": storage, "MODE": mode}
    for started in (True, False):
        constants["STARTED"] = started
        for match in MATCHES if mode == "given" else ("none",):
            types = [*pointers, "*fp32", "*fp32", *sizes, "fp32"]
            assert compiled(_kernels.compare, types, **constants, MATCH=match)["cubin"]
        types = [*pointers, "*fp32", "*fp32", "*i64", *sizes, "fp32", "fp32"]
        assert compiled(_kernels.finish, types, **constants, CHUNK=128)["cubin"]
    for match in set(MATCHES) - {"none"}:
        types = [outputs, outputs, "*fp32", "i32", "i32", "i32"]
        assert compiled(_kernels.products, types, BLOCK=128, MATCH=match)["cubin"]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_average_compiles_for_a_gpu(aligned):
    types = ["*i64", "*i64", "*i64", "*i1", "*i64", "*i64", "*fp64"]
    made = compiled(_kernels.average, types, BLOCK=4096, ALIGNED=aligned)
    assert "sqrt.rn.f32" in made["ptx"]
