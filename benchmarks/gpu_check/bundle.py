"""Make a bundle, with which a machine that has no network checks its GPU; see scripts/gpu_bundle.sh.

A bundle is a directory of the repository that git ignores. It has the wheels that the machine lacks, values that need
no GPU (`expect` of the parts), and what the sources are.
"""

from __future__ import annotations

import argparse
import gzip
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.gpu_check import forks, preload
from benchmarks.gpu_check.collect import collect
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.record import write_json
from benchmarks.gpu_check.runner import REPOSITORY
from benchmarks.gpu_check.setting import ABOUT, EXPECTED, Setting
from benchmarks.gpu_check.stand_in import run_stand_in

BUNDLE = ".gpu_bundle"  # in the repository
WHEELS = "whl"  # in the bundle
PYTHON = "3.12"  # of the machine with the GPU
MIB = 2**20
MOST_BYTES = 60 * MIB  # of the sources and the bundle together
SECONDS, SECONDS_TO_END = 470, 10  # of the command
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
_WITHOUT_WHEELS = {"antlr4-python3-runtime"}  # pip builds a wheel of its sources
_AT_ONCE = 2  # processes that compute expected values
COMMAND = f"""\
set -o pipefail; parts= seconds={SECONDS}; export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE= \
PYTORCH_NVML_BASED_CUDA_CHECK=1 OMP_NUM_THREADS=4; w=$(mktemp -d) && python3 -m pip install -q --no-index --no-deps \
--no-compile --no-cache-dir --upgrade --target "$w/site" {BUNDLE}/{WHEELS}/*.whl && \
PYTHONPATH=$w/site:$PWD timeout -k 5 $((seconds + {SECONDS_TO_END})) python3 -m benchmarks.gpu_check \
--bundle {BUNDLE} --seconds $seconds --work "$w" --output "$OUT" $parts 2>&1 | tee "$OUT/log.txt" | \
grep --line-buffered -E '^(==|FAILS)'; status=$?; tail -c 9000 "$OUT/report.md"; (exit $status)"""


class BundleError(Exception):
    """The bundle cannot be made."""


def requirements(repository: Path = REPOSITORY, python: str = PYTHON) -> list[str]:
    """Return the name and the version of every wheel, as constraints.txt has it for the machine's Python."""
    # pip itself evaluates markers with the Python that runs it.
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    pinned = {}
    for line in _lines(repository / "constraints.txt"):
        requirement, _, marker = line.partition(";")
        name, _, version = requirement.strip().partition("==")
        if not marker or Marker(marker).evaluate(environment):
            pinned[canonicalize_name(name)] = version
    named = [line.partition("==") for line in _lines(repository / "benchmarks" / "gpu_check" / "wheels.txt")]
    return [f"{name}=={version or pinned[canonicalize_name(name)]}" for name, _, version in named]


def _lines(path: Path) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def fetch_wheels(directory: Path, further: Path | None) -> None:
    """Put all wheels into a new directory, with those of another directory.

    Raises:
        BundleError: pip does not find a wheel, or there are two of one distribution.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    pip, wheels = [sys.executable, "-m", "pip"], requirements()
    built = [wheel for wheel in wheels if wheel.partition("==")[0] in _WITHOUT_WHEELS]
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    for command in (
        [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON,
         "--implementation", "cp", *platforms, "--dest", str(directory), *(set(wheels) - set(built))],
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), *built],
    ):  # fmt: skip
        if subprocess.run(command).returncode:
            raise BundleError(f"{' '.join(command)} failed")
    for path in sorted(further.glob("*.whl")) if further is not None else ():
        shutil.copy(path, directory)
    check_wheels(directory)


def check_wheels(directory: Path) -> None:
    """Check that there is one wheel of each distribution, because pip stops if it gets two.

    Raises:
        BundleError: There are two.
    """
    files: dict[str, str] = {}
    for path in sorted(directory.glob("*.whl")):
        name = parse_wheel_filename(path.name)[0]
        if name in files:
            raise BundleError(f"two wheels of {name}: {files[name]} and {path.name}; pip would install neither")
        files[name] = path.name


def compute_expected(path: Path) -> None:
    """Compute what all parts expect, in processes that see no GPU, and write it.

    Raises:
        BundleError: A part cannot compute it.
    """
    import torch

    names, running, values = [name for name in PARTS if hasattr(_module(name), "expect")], {}, {}
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        while names or running:
            while names and len(running) < _AT_ONCE:
                name, began = names.pop(), time.monotonic()  # the last parts take longest
                log, result = Path(scratch, f"{name}.log"), Path(scratch, f"{name}.pt")
                process = forks.start(_expecting(name, Path(scratch, name), result), log, variables)
                running[name] = process, log, result, began
            time.sleep(0.1)
            for name, (process, log, result, began) in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[name]
                if status:
                    forks.end(*(other[0] for other in running.values()))
                    raise BundleError(f"expected values of {name}:\n{log.read_text()}")
                found = torch.load(result, weights_only=False)
                values |= found
                print(f"{name}: {len(found)} expected values in {time.monotonic() - began:.0f} s", flush=True)
    with gzip.open(path, "wb", compresslevel=6) as file:
        torch.save(values, file)


def _module(name: str) -> Any:
    return import_module(f"benchmarks.gpu_check.parts.{name}")


def _expecting(name: str, directory: Path, result: Path) -> Callable[[], int]:
    def compute() -> int:
        import torch

        torch.save(_module(name).expect(Setting("cuda", False, directory)), result)
        return 0

    return compute


def about() -> dict[str, str]:
    """Return what the sources are, and with which software expected values are computed."""
    commit, changed = _git("rev-parse", "--short", "HEAD").strip(), bool(_git("status", "--porcelain"))
    software = [f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core", "transformers")]
    return {
        "commit": f"{commit}, changed" if changed else commit,
        "prepared": datetime.now(UTC).strftime("%Y-%m-%d"),
        "expected values": ", ".join([f"Python {platform.python_version()}", *software]),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def check_size(bundle: Path, most: int = MOST_BYTES) -> tuple[int, int]:
    """Return the bytes of the sources (with new files that git does not ignore) and of the bundle.

    Raises:
        BundleError: They are too many.
    """
    names = filter(None, _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"))
    sizes = (
        sum(path.stat().st_size for path in map(REPOSITORY.joinpath, names) if path.is_file()),
        sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()),
    )
    if sum(sizes) > most:
        raise BundleError(f"sources and bundle have {sum(sizes) / MIB:.1f} MiB; they may have {most / MIB:.0f}")
    return sizes


def prepare(further_wheels: Path | None) -> None:
    """Make the bundle, and print the command that uses it.

    Raises:
        BundleError: It cannot be made.
    """
    began, bundle = time.monotonic(), REPOSITORY / BUNDLE
    fetch_wheels(bundle / WHEELS, further_wheels)
    print(f"{len(list((bundle / WHEELS).iterdir()))} wheels in {time.monotonic() - began:.0f} s", flush=True)
    preload.import_all()
    compute_expected(bundle / EXPECTED)
    write_json(bundle / ABOUT, about())
    sources, size = check_size(bundle)
    print(f"sources {sources / MIB:.1f} MiB, {BUNDLE} {size / MIB:.1f} MiB, in {time.monotonic() - began:.0f} s")
    print(
        f"Copy both to the machine with the GPU. There, run this in the copy; OUT is an empty directory:\n\n{COMMAND}\n"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/gpu_bundle.sh", description=__doc__)
    actions = made.add_subparsers(dest="action", required=True)
    preparing = actions.add_parser("prepare", help=f"make {BUNDLE}, and print the command for the machine with the GPU")
    preparing.add_argument("--te", type=Path, metavar="DIR", help="wheels of Transformer Engine for that machine")
    actions.add_parser("stand-in", help="run the command with --device cpu, with the machine's versions")
    collecting = actions.add_parser("collect", help="take over the results that the command wrote")
    collecting.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="default: only order the table")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.action == "prepare":
            prepare(options.te)
        elif options.action == "collect":
            collect(options.directory)
        else:
            return run_stand_in(COMMAND, REPOSITORY / BUNDLE / WHEELS)
    except (BundleError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
