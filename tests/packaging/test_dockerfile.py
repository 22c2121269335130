"""The container image keeps the versions that its base image was built with, and has our pins of all others."""

import os
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize("has_constraints", [True, False])
def test_the_installation_keeps_the_versions_of_the_base_image_and_pins_the_others(tmp_path, has_constraints):
    (command,) = re.findall(r"^RUN (python .*?[^\\])$", (REPO / "Dockerfile").read_text(), re.DOTALL | re.MULTILINE)
    pip = f'if [ "$1" = list ]; then echo huggingface-hub==1.0; else cat $PIP_CONSTRAINT >{tmp_path}/seen; fi'
    for name, script in {"python": "echo torch==2.11.0", "pip": pip}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if has_constraints:
        (tmp_path / "of_the_image.txt").write_text("NumPy==1.26.4\njinja2 @ file:///wheels/jinja2.whl\n")
        environment["PIP_CONSTRAINT"] = f"{tmp_path}/of_the_image.txt"
    command = command.replace("\\\n", " ").replace("/tmp/", f"{tmp_path}/").replace("/opt/rl_megatron", str(REPO))
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "torch==2.11.0" in seen
    pins = [line for line in (REPO / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    held = ["huggingface_hub", "megatron-core", "triton", *(["numpy", "Jinja2"] if has_constraints else [])]
    assert {line for line in pins if line.partition("==")[0] not in held} == set(seen) & set(pins)
