"""Run the command of a bundle on this machine's CPU, with the versions of the machine that has the GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path

from benchmarks.gpu_check.report import REPORT, RESULTS
from benchmarks.gpu_check.runner import REPOSITORY

SECONDS = 1500
MOST_FILES = 8
PYTHON = "STAND_IN_PYTHON"
_HIDDEN, _SITE = "STAND_IN_HIDDEN", "STAND_IN_SITE"
# Every process of the stand-in imports it. Modules of wheels are found only where the command has installed them.
_HIDE = f"""
import importlib.abc, importlib.machinery, os, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in os.environ["{_HIDDEN}"].split(","):
            return None
        kept = [entry for entry in sys.path if not entry.startswith(os.environ["{_SITE}"])]
        found = importlib.machinery.PathFinder.find_spec(name, kept)
        if found is None:
            raise ModuleNotFoundError(f"{{name}}: the machine with the GPU does not have it", name=name)
        return found
sys.meta_path.insert(0, Hide())
"""


def run_stand_in(command: str, wheels: Path) -> int:
    """Run the command with `--device cpu`; return 0 if all parts pass and its files are as they have to be.

    Args:
        command: The command, which begins with its settings.
        wheels: The wheels that it installs. Other copies of their modules are hidden.
    """
    python = os.environ[PYTHON]
    with tempfile.TemporaryDirectory() as scratch:
        output, programs, hook = (Path(scratch) / name for name in ("output", "programs", "hook"))
        for directory in (output, programs, hook):
            directory.mkdir()
        (hook / "sitecustomize.py").write_text(_HIDE)
        program = programs / "python3"
        program.write_text(f'#!/bin/sh\nPYTHONPATH="{hook}:$PYTHONPATH" exec "{python}" "$@"\n')
        program.chmod(0o755)
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
        ).stdout.strip()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(output), _SITE: site}
        environment |= {_HIDDEN: ",".join(modules_of(wheels)), "TMPDIR": scratch}
        command = command.replace("parts= ", "parts='--device cpu' ", 1)
        command = re.sub(r"seconds=\d+", f"seconds={SECONDS}", command, count=1)
        status = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, env=environment).returncode
        problems = problems_of(output)
    for problem in problems:
        print(f"FAILS  {problem}")
    return 1 if problems or status else 0


def modules_of(wheels: Path) -> list[str]:
    """Return the top-level modules of wheels."""
    names = {name for path in wheels.glob("*.whl") for name in zipfile.ZipFile(path).namelist()}
    first = {name.split("/")[0].removesuffix(".py") for name in names if name.endswith(".py")}
    return sorted(name for name in first if name.isidentifier())


def problems_of(output: Path) -> list[str]:
    """Return what is wrong with the files that the command has written."""
    names = sorted(path.name for path in output.iterdir())
    problems = [f"{name} is not a plain file" for name in names if not (output / name).is_file()]
    problems += [f"the name {name!r}" for name in names if not re.fullmatch(r"[A-Za-z0-9._-]+", name)]
    if len(names) > MOST_FILES:
        problems.append(f"{len(names)} files: {', '.join(names)}")
    if not {RESULTS, REPORT} <= set(names):
        return [*problems, f"the files are {', '.join(names)}"]
    parts = json.loads((output / RESULTS).read_text())["parts"]
    wrong = {name: part["status"] for name, part in parts.items() if part["status"] not in ("passed", "skipped")}
    return problems + [f"{name}: {status}" for name, status in wrong.items()]
