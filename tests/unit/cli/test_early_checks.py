"""Mistakes in paths and files are answered before torch, megatron-core and transformers are imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.early_cases import CASES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a fresh process answers to each of the cases."""
    command = [sys.executable, "-m", "tests.unit.cli.early_cases", str(tmp_path_factory.mktemp("early"))]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered_in_one_line_without_heavy_imports(answers, name):
    status, line = answers[name]
    assert status == 2
    assert re.fullmatch(r"error: [^\n]+\n", line), line
    assert re.search(CASES[name][1], line), line
