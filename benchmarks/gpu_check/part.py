"""Run one part in this process, and write its result: `python -m benchmarks.gpu_check.part NAME …`."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting


def run_part(name: str, setting: Setting, result: Path) -> int:
    """Run a part, write its result, and return 0 if all its checks hold."""
    record = Record(result)
    record.save()
    setting.directory.mkdir(parents=True, exist_ok=True)
    importlib.import_module(f"benchmarks.gpu_check.parts.{name}").run(setting, record)
    failed = [check for check in record.checks if not check.holds]
    for check in record.checks:
        print(f"{'holds' if check.holds else 'FAILS':6} {check.name}: {check.value} ({check.limit})")
    for figure in record.figures:
        print(f"       {figure.name}: {figure.value:,.4g} {figure.unit}")
    for name, text in record.facts.items():
        print(f"       {name}: {text}")
    for name, reason in record.not_measured.items():
        print(f"       {name}: not measured: {reason}")
    if record.skipped:
        print(f"skipped: {record.skipped}")
    if not (record.checks or record.figures or record.skipped):
        print("the part found nothing", file=sys.stderr)
        return 1
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(arguments)
    setting = Setting(options.device, options.tiny or options.device == "cpu", options.directory)
    try:
        return run_part(options.name, setting, options.result)
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
