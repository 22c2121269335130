"""`pytest tests/gpu`: kernels on the real compiler, the fused head against fp64, CUDA IPC, and offloading."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from xml.etree import ElementTree

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.runner import REPOSITORY
from benchmarks.gpu_check.setting import Setting

_PROCESSES, _SECONDS_OF_A_TEST = 6, 60


def rows(tiny: bool) -> list[str]:
    return ["tests that passed", "tests that were skipped"]


def run(setting: Setting, record: Record) -> None:
    tests, report = REPOSITORY / "tests" / "gpu", setting.directory / "tests.xml"
    chosen = tests / "test_weight_gradients.py" if setting.tiny else tests
    processes = 2 if setting.tiny else _PROCESSES
    options = ["-p", "no:cacheprovider", "--junitxml", str(report), "--tb", "short"]
    if find_spec("xdist"):
        options += ["-n", str(processes), "--dist", "worksteal"]
    if find_spec("pytest_timeout"):
        options += ["--timeout", str(_SECONDS_OF_A_TEST)]
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", *options, str(chosen)], cwd=REPOSITORY).returncode
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    total, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            record.fact(f"failed {case.get('classname')}", str(case.get("name")))
    record.figure("tests that passed", total - failed - skipped)
    record.figure("tests that were skipped", skipped)
    record.equal("failed tests", failed, 0)
    record.equal("pytest's exit status", status, 0)
    if setting.on_gpu:
        record.at_least("tests that passed on this GPU", total - failed - skipped, 1)
    elif skipped == total:
        record.skip("all tests need a GPU")
