"""Run one part, and write its result; also as a command: `python -m benchmarks.gpu_check.part NAME …`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting


def run_part(name: str, setting: Setting, result: Path) -> int:
    """Run a part, write its result, and return 0 if it ends and all its checks hold."""
    record = Record(result)
    record.save()
    setting.directory.mkdir(parents=True, exist_ok=True)
    try:
        importlib.import_module(f"benchmarks.gpu_check.parts.{name}").run(setting, record)
    except Exception as error:
        traceback.print_exc()
        print(f"FAILS  {name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
        record.fail(traceback.format_exc())
    for check in record.checks:
        print(f"{'holds' if check.holds else 'FAILS':6} {name}: {check.name}: {check.value} ({check.limit})")
    for figure in record.figures:
        print(f"       {figure.name}: {figure.value:,.4g} {figure.unit}")
    for what, text in record.facts.items():
        print(f"       {what}: {text}")
    for what, reason in record.not_measured.items():
        print(f"       {what}: not measured: {reason}")
    if record.skipped:
        print(f"skipped: {record.skipped}")
    if record.error is None and not (record.checks or record.figures or record.skipped):
        record.fail("the part found nothing")
    return 1 if record.error is not None or any(not check.holds for check in record.checks) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.seconds
    setting = Setting(options.device, options.tiny, options.directory, options.bundle, ends)
    return run_part(options.name, setting, options.result)


if __name__ == "__main__":
    sys.exit(main())
