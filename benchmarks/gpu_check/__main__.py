"""Parse the command line of `python -m benchmarks.gpu_check`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks.gpu_check
from benchmarks.gpu_check import forks, preload
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.report import REPORT, RESULTS
from benchmarks.gpu_check.runner import REPOSITORY, TOTAL_SECONDS, Call, Stopped, run_parts
from benchmarks.gpu_check.setting import ABOUT

NO_GPU = 3
_NAME = "name of the GPU: "
_TRY = f"""
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {{torch.__version__}} sees no GPU; its CUDA version: {{torch.version.cuda}}")
assert torch.ones(2, device="cuda").sum().item() == 2
print({_NAME!r} + torch.cuda.get_device_name())
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description=benchmarks.gpu_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {part.name:12} {part.meaning}" for part in PARTS.values()),
    )
    optional = ", ".join(part.name for part in PARTS.values() if not part.is_default)
    made.add_argument(
        "parts", nargs="*", choices=[[], *PARTS], metavar="PART",
        help="default: all" + (f" but {optional}" if optional else ""),
    )  # fmt: skip
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="shapes that take seconds; always on the CPU")
    made.add_argument("--bundle", type=Path, metavar="DIR", help="what scripts/gpu_bundle.sh prepare made")
    made.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help=f"of all parts (default: {TOTAL_SECONDS})")
    made.add_argument(
        "--output", type=Path, default=REPOSITORY / "outputs" / "gpu_check", metavar="DIR",
        help="the results: a few files (default: outputs/gpu_check of the repository)",
    )  # fmt: skip
    made.add_argument(
        "--work", type=Path, metavar="DIR", help="logs and files of parts (default: work in the output directory)"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    options = parser().parse_args(arguments)
    output = options.output.resolve()
    work = output / "work" if options.work is None else options.work.resolve()
    preload.import_all()
    card, is_forked = "CPU", True
    if options.device == "cuda":
        card, problem = try_gpu_in_fork()
        if problem is not None:
            in_fork, is_forked = problem, False
            card, problem = try_gpu_in_command()
            if problem is not None:
                why = f"{problem}; nothing was checked (PYTHON names another interpreter)"
                print(f"no usable GPU: {why}", file=sys.stderr)
                return NO_GPU
            print(f"== parts are commands, because forks cannot use the GPU: {in_fork}", flush=True)
    names = options.parts or [part.name for part in PARTS.values() if part.is_default]
    bundle = None if options.bundle is None else options.bundle.resolve()
    about = about_of(bundle) | {"imports": f"{sum(preload.SECONDS.values()):.1f} s"}
    call = Call(options.device, options.tiny, output, work, bundle, began + options.seconds, card, about, is_forked)
    try:
        passed = run_parts(names, call)
    except Stopped:
        print(f"== this command was ended; {output} has the results so far", flush=True)
        return 1
    print(f"\n{(output / REPORT).read_text()}\n{output / RESULTS} has all results, and {output / REPORT} these tables")
    return 0 if passed else 1


def about_of(bundle: Path | None) -> dict[str, Any]:
    """Return what a bundle says of the sources, and of the software with which its values were computed."""
    path = bundle and bundle / ABOUT
    return json.loads(path.read_text()) if path and path.exists() else {}


def try_gpu_in_fork() -> tuple[str, str | None]:
    """Return the name of the GPU, and why a fork of this process cannot compute on one, or None."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        process = forks.start(lambda: exec(_TRY, {}) or 0, log, {})
        while (status := process.poll()) is None:
            time.sleep(0.05)
        return _name_and_problem(status, log.read_text(errors="replace"))


def try_gpu_in_command() -> tuple[str, str | None]:
    """Return the name of the GPU, and why a new process cannot compute on one, or None."""
    tried = subprocess.run([sys.executable, "-c", _TRY], capture_output=True, text=True)
    return _name_and_problem(tried.returncode, tried.stdout + tried.stderr)


def _name_and_problem(status: int, output: str) -> tuple[str, str | None]:
    lines = output.strip().splitlines()
    names = [line.removeprefix(_NAME) for line in lines if line.startswith(_NAME)]
    return (names[0], None) if status == 0 and names else ("", lines[-1] if lines else "it ended without a message")


if __name__ == "__main__":
    sys.exit(main())
