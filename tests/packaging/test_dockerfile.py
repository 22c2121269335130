"""The container image keeps the versions that its base image was built with."""

import os
import re
import subprocess
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"


@pytest.mark.parametrize("constraint", ["/etc/pip/constraint.txt", None])
def test_the_installation_keeps_the_constraints_of_the_base_image(tmp_path, constraint):
    (command,) = re.findall(r"^RUN (python .*?[^\\])$", DOCKERFILE.read_text(), re.DOTALL | re.MULTILINE)
    for name, script in {"python": "echo torch==2.11.0", "pip": 'echo "$PIP_CONSTRAINT" >"$SEEN"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen")}
    environment |= {} if constraint is None else {"PIP_CONSTRAINT": constraint}
    command = command.replace("\\\n", " ").replace("/tmp/", f"{tmp_path}/")
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    files = (tmp_path / "seen").read_text().split()
    assert files == ([constraint] if constraint else []) + [f"{tmp_path}/torch.txt"]
