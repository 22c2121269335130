"""Parse the command line of `python -m benchmarks.gpu_check`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu_check
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.report import REPORT, write_report
from benchmarks.gpu_check.runner import REPOSITORY, RESULTS, run_parts

NO_GPU = 3
_TRY = """
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU; its CUDA version: {torch.version.cuda}")
assert torch.ones(2, device="cuda").sum().item() == 2
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description=benchmarks.gpu_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {part.name:12} {part.meaning}" for part in PARTS.values()),
    )
    made.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help="default: all")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="shapes that take seconds; always on the CPU")
    made.add_argument(
        "--output", type=Path, default=REPOSITORY / "outputs" / "gpu_check", metavar="DIR",
        help="results, logs and files (default: outputs/gpu_check of the repository)",
    )  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.device == "cuda" and (problem := problem_of_gpu()) is not None:
        print(f"no usable GPU: {problem}; nothing was checked (PYTHON names another interpreter)", file=sys.stderr)
        return NO_GPU
    output = options.output.resolve()
    passed = run_parts(options.parts or list(PARTS), options.device, options.tiny, output)
    print(f"\n{write_report(output)}\n{output / RESULTS} has all results, and {output / REPORT} these tables")
    return 0 if passed else 1


def problem_of_gpu() -> str | None:
    """Return why torch cannot compute on a GPU, or None. It is tried in another process, which frees the GPU."""
    tried = subprocess.run([sys.executable, "-c", _TRY], capture_output=True, text=True)
    return None if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["it ended without a message"])[-1]


if __name__ == "__main__":
    sys.exit(main())
