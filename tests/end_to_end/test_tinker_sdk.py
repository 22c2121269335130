"""The unmodified Tinker SDK against a server: the client of docs/training_service.md learns on one rank and on four."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.collector import blocks
from tests.docs.inputs import hugging_face_model
from tests.end_to_end.launch import TIMEOUT
from tests.forkserver import REPOSITORY
from tests.ports import free_port

PYTHON = REPOSITORY / ".venv-tinker" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"there is no {PYTHON}: scripts/install_tinker.sh makes the SDK's environment"
)
PAGE = blocks("docs/training_service.md")
LAYOUTS = {1: (), 4: ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")}


def words_of_the_page() -> list[str]:
    """Return the words of the page's command for one rank."""
    return next(block.text for block in PAGE if block.text.startswith("rl-megatron training-server")).split()[1:]


def run_client(directory: Path, url: str) -> str:
    """Run the page's client, and return what it prints."""
    (client,) = (block for block in PAGE if block.title == "client.py")
    (directory / "client.py").write_text(client.text)
    key = (directory / "outputs" / "service" / "key").read_text().strip()
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, "client.py"], cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_client_of_the_page_learns(ranks, tmp_path, forks):
    """Its loss halves in 20 steps, and the path of the saved state is printed."""
    hugging_face_model(tmp_path / "path" / "to" / "Qwen2.5-0.5B")
    port = free_port()
    words = [*words_of_the_page(), *LAYOUTS[ranks], "device=cpu", "--port", str(port)]
    with forks.start(tmp_path, *words, ranks=ranks) as server:
        server.wait_until((tmp_path / "outputs" / "service" / "journal").exists, "its journal")
        printed = run_client(tmp_path, f"http://127.0.0.1:{port}").splitlines()
    losses = [float(line.split()[1]) for line in printed[:20]]
    assert losses[-1] < losses[0] / 2, losses
    assert re.fullmatch(r"tinker://session-\w+:train:0/weights/sentence", printed[20])
    assert len(printed) >= 22
