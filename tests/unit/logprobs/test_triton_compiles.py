"""The Triton kernels through Triton's compiler, for a GPU that nobody needs to have: it refuses what its interpreter
accepts, and shows how the logits are read."""

import os
import subprocess
import sys

import pytest

DTYPES = {"logits": "{}", "out": "{}", "columns": "i64", "active": "i1"}
INTEGERS = ("row_stride", "out_stride", "num_columns", "num_targets")
HOPPER = ("cuda", 90, 32)


def compiled(kernel, dtype, num_warps, **constants):
    """The kernel's PTX where rows and strides are aligned to 16 elements; arguments in `constants` are no tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constexprs, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(position,)] = "constexpr", constants[name]
        else:
            signature[name] = "i32" if name in INTEGERS else "*" + DTYPES.get(name, "fp32").format(dtype)
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return compile(ASTSource(kernel, signature, constexprs, attributes), GPUTarget(*HOPPER), options).asm["ptx"]


def check_kernels():
    from rl_megatron.logprobs.kernels import triton as triton_kernels

    assert not triton_kernels.INTERPRETED
    for num_columns, dtype, optional in (
        (151936, "bf16", {}),
        (5000, "fp32", {"temperature": None, "threshold": None}),
    ):
        block, warps = triton_kernels.block_of(num_columns)
        vector_loads = block * {"fp32": 4, "bf16": 2}[dtype] // (16 * 32 * warps)
        shape = {"BLOCK": block, **optional}
        forward = [
            compiled(triton_kernels._row_stats_kernel, dtype, warps, ENTROPY=entropy, **shape)
            for entropy in (True, False)
        ]
        backward = [
            compiled(triton_kernels._row_gradients_kernel, dtype, warps, TARGETS=targets, **shape)
            for targets in (0, 1, 4)
        ]
        backward += [
            compiled(triton_kernels._row_gradients_kernel, dtype, warps, TARGETS=1, entropy_grad=None, **shape)
        ]
        for ptx in forward + backward:
            # In the loop over whole blocks and in what is left after it: 128 bits each, and no second read of a logit.
            assert ptx.count("ld.global.v4.b32") == 2 * vector_loads, ptx
            assert "atom." not in ptx and ".local" not in ptx
        assert all("st.global.v4.b32" in ptx for ptx in backward)


def test_the_kernels_compile_for_a_gpu_and_read_128_bits_at_a_time(tmp_path):
    pytest.importorskip("triton", minversion="3.6")  # the compiler's entry points are no public interface
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = f"import {__name__} as this; this.check_kernels()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
