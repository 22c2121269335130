"""The Triton kernels through Triton's compiler and NVIDIA's assembler, for GPUs that nobody needs to have.

The compiler refuses what its interpreter accepts. Its results show how the logits are read and written, and what a
program takes of a multiprocessor.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

pytestmark = pytest.mark.change

ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200
DTYPES = {
    "logits": "{}", "out": "{}", "columns": "i64", "active": "i1", "ids": "i64", "ignored": "i1", "touched": "i1",
}  # fmt: skip
INTEGERS = (
    "row_stride", "out_stride", "num_columns", "num_targets", "start", "num_ids", "part_stride", "num_parts",
    "num_rows",
)  # fmt: skip
FORWARD = tuple({"ENTROPY": entropy} for entropy in (True, False))
BACKWARD = (*({"TARGETS": targets} for targets in (0, 1, 4)), {"TARGETS": 1, "entropy_grad": None})
PLAIN = {"temperature": None, "threshold": None}
# (columns, dtype of the logits, arguments that are None, whether rows begin at multiples of 16 elements): every two of
# rows of eight warps or four, bf16 or fp32, and temperature and threshold or neither come together.
LOGITS = (
    (151936, "bf16", {}, True),
    (151936, "fp32", PLAIN, True),
    (5000, "bf16", PLAIN, True),
    (5000, "fp32", {}, True),
    (50257, "bf16", {}, False),
)
# With so many per thread, a multiprocessor's 65,536 registers are enough for three programs of eight warps if rows are
# aligned, and otherwise for five programs of four warps.
MOST_REGISTERS = {True: 80, False: 96}
# Triton 3.8's assembler keeps one value of one variant for sm_100 in memory, outside the loop over the columns.
MOST_STACK_BYTES = 8


def compiled(kernel, architecture, dtype, num_warps, aligned, constants):
    """Return the kernel as Triton compiles it; `constants` are the values of arguments that are no tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constexprs, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(position,)] = "constexpr", constants[name]
            continue
        signature[name] = "i32" if name in INTEGERS else "*" + DTYPES.get(name, "fp32").format(dtype)
        if aligned or name not in INTEGERS:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return compile(ASTSource(kernel, signature, constexprs, attributes), GPUTarget("cuda", architecture, 32), options)


def resources(cubin):
    """Return what cuobjdump says that a thread of the only kernel of `cubin` uses: registers, bytes of memory."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def print_variants(architecture):
    """Compile every variant for an architecture in this process, and print what there is to know about each."""
    from rl_megatron.logprobs.kernels import triton as kernels

    assert not kernels.INTERPRETED
    variants, of_rows = [], []
    for num_columns, dtype, absent, aligned in LOGITS:
        block, warps = kernels.choose_block(num_columns)
        for kernel, modes in ((kernels.row_stats_kernel, FORWARD), (kernels.row_gradients_kernel, BACKWARD)):
            for mode in modes if aligned else modes[:1]:
                constants = {"BLOCK": block} | absent | mode
                result = compiled(kernel, architecture, dtype, warps, aligned, constants)
                ptx = result.asm["ptx"]
                variant = {
                    "name": f"{kernel.fn.__name__}, {num_columns} columns of {dtype}, {constants}",
                    "aligned": aligned,
                    "writes": kernel is kernels.row_gradients_kernel,
                    "vectors": block * {"fp32": 4, "bf16": 2}[dtype] // (16 * 32 * warps),
                    "loads": ptx.count("ld.global.v4.b32"),
                    "stores": ptx.count("st.global.v4.b32"),
                    "atomics": ptx.count("atom."),
                    **resources(result.asm["cubin"]),
                }
                variants.append(variant)
    for kernel, absent in (
        (kernels.local_columns_kernel, {}), (kernels.merge_rows_kernel, {}),
        (kernels.merge_rows_kernel, {"row_entropy": None}), (kernels.target_slopes_kernel, {}),
        (kernels.target_slopes_kernel, {"entropy_grad": None, "entropy": None}),
    ):  # fmt: skip
        result = compiled(kernel, architecture, "fp32", 4, False, {"BLOCK": kernels.ROWS} | absent)
        rounds = [text for text in ("lg2.approx", "div.full", "div.approx") if text in result.asm["ptx"]]
        of_rows.append({"name": kernel.fn.__name__, "rounds": rounds, **resources(result.asm["cubin"])})
    print(json.dumps({"variants": variants, "of_rows": of_rows}))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled_kernels(request):
    """Return what another process prints, because the kernels of this one are interpreted."""
    pytest.importorskip("triton", minversion="3.6")  # the compiler's entry points are no public interface
    program = f"import {__name__} as this; this.print_variants({request.param})"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture
def variants(compiled_kernels):
    variants = compiled_kernels["variants"]
    assert len(variants) == 4 * (len(FORWARD) + len(BACKWARD)) + 2
    return variants


def test_rows_are_merged_in_registers_with_exact_logarithms(compiled_kernels):
    of_rows = compiled_kernels["of_rows"]
    assert len(of_rows) == 5
    assert not [kernel for kernel in of_rows if kernel["rounds"] or kernel["STACK"] or kernel["LOCAL"]]


def test_several_programs_fit_on_a_multiprocessor(variants):
    assert not [variant for variant in variants if not 0 < variant["REG"] <= MOST_REGISTERS[variant["aligned"]]]


def test_values_stay_in_registers(variants):
    assert not [variant for variant in variants if variant["STACK"] > MOST_STACK_BYTES or variant["LOCAL"]]


def test_logits_are_read_once_and_128_bits_at_a_time(variants):
    # In the loop over whole blocks, and once more in what is left after it.
    assert not [v for v in variants if v["aligned"] and v["loads"] != 2 * v["vectors"]]


def test_gradients_are_written_128_bits_at_a_time(variants):
    # As they are read, and zeros in the rows that are not active.
    assert not [v for v in variants if v["aligned"] and v["stores"] != (3 * v["vectors"] if v["writes"] else 0)]


def test_no_sum_depends_on_an_order_of_programs(variants):
    assert not [variant for variant in variants if variant["atomics"]]
