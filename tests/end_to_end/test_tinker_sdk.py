"""The unmodified Tinker SDK against a server: clients of the page and of the example learn on one and four ranks."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sysconfig
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from tests.docs.collector import blocks
from tests.docs.inputs import hugging_face_model
from tests.end_to_end.launch import TIMEOUT
from tests.end_to_end.page_commands import check_readme, commands, repository_in, run
from tests.forkserver import REPOSITORY
from tests.ports import free_port

PYTHON = REPOSITORY / ".venv-tinker" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"there is no {PYTHON}: scripts/install_tinker.sh makes the SDK's environment"
)
PAGE = blocks("docs/training_service.md")
EXAMPLE = REPOSITORY / "examples" / "training_service"
LAYOUTS = {1: (), 4: ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")}


def words_of_the_page() -> list[str]:
    """Return the words of the page's command for one rank."""
    return next(block.text for block in PAGE if block.text.startswith("rl-megatron training-server")).split()[1:]


def run_client(client: Path, directory: Path, url: str, *arguments: str) -> str:
    """Run a client in a directory, and return what it prints."""
    key = (directory / "outputs" / "service" / "key").read_text().strip()
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1"}
    environment["TORCH_SITE_PACKAGES"] = sysconfig.get_path("platlib")
    done = subprocess.run(
        [PYTHON, client, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_client_of_the_page_learns(ranks, tmp_path, forks):
    """Its loss halves in 20 steps, and the path of the saved state is printed."""
    hugging_face_model(tmp_path / "path" / "to" / "Qwen2.5-0.5B")
    (block,) = (block for block in PAGE if block.title == "client.py")
    client = tmp_path / "client.py"
    client.write_text(block.text)
    port = free_port()
    words = [*words_of_the_page(), *LAYOUTS[ranks], "device=cpu", "--port", str(port)]
    with forks.start(tmp_path, *words, ranks=ranks) as server:
        server.wait_until((tmp_path / "outputs" / "service" / "journal").exists, "its journal")
        printed = run_client(client, tmp_path, f"http://127.0.0.1:{port}").splitlines()
    losses = [float(line.split()[1]) for line in printed[:20]]
    assert losses[-1] < losses[0] / 2, losses
    assert re.fullmatch(r"tinker://session-\w+:train:0/weights/sentence", printed[20])
    assert len(printed) >= 22


LOOPS = ("resume", "prefer", "distill", "take_turns")


@pytest.fixture(scope="module")
def loops(tmp_path_factory, forks):
    """What each loop of tests/tinker_loops.py prints, by the number of the server's ranks."""
    printed = {}
    for ranks, layout in LAYOUTS.items():
        directory, port = tmp_path_factory.mktemp("loops"), free_port()
        hugging_face_model(directory / "path" / "to" / "Qwen2.5-0.5B")
        with forks.start(
            directory, *words_of_the_page(), *layout, "device=cpu", "--port", str(port), ranks=ranks
        ) as server:
            server.wait_until((directory / "outputs" / "service" / "journal").exists, "its journal")
            client, url = REPOSITORY / "tests" / "tinker_loops.py", f"http://127.0.0.1:{port}"
            printed[ranks] = {name: json.loads(run_client(client, directory, url, name)) for name in LOOPS}
    return printed


@pytest.mark.parametrize("ranks", LAYOUTS)
class TestLoops:
    """What the SDK's verbs do together, on one rank and on four."""

    def test_a_run_continues_from_its_state_bitwise(self, loops, ranks):
        losses = loops[ranks]["resume"]
        assert losses["again"] == losses["after"] != losses["anew"]
        assert losses["after"][-1] < losses["before"][0] * 2 / 3
        assert losses["anew"][0] == losses["after"][0], "without the optimizer, the weights are the same"

    def test_a_loss_of_the_clients_own_raises_the_margin(self, loops, ranks):
        margins = loops[ranks]["prefer"]["margin"]
        assert abs(margins[0]) < 1e-4 and margins[-1] > 5, margins

    def test_a_student_comes_near_its_teacher(self, loops, ranks):
        first, *_, last = loops[ranks]["distill"]["divergence"]
        assert last < first / 2

    def test_two_runs_at_once_get_bitwise_what_each_gets_alone(self, loops, ranks):
        losses = loops[ranks]["take_turns"]
        assert losses["together"] == losses["alone"] and losses["alone"][0] != losses["alone"][1]


@pytest.mark.parametrize("name", ["resume", "prefer", "take_turns"])
def test_layouts_give_a_client_the_same_metrics(loops, name):
    one, four = loops[1][name], loops[4][name]
    assert one.keys() == four.keys()
    for key in one:
        np.testing.assert_allclose(four[key], one[key], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def sums(tmp_path_factory, forks):
    """A directory with the example's model and problems, and what the command printed that trained the model."""
    directory = repository_in(tmp_path_factory.mktemp("sums"))
    (command,) = (command for command in commands((EXAMPLE / "README.md").read_text()) if command.startswith("rl-meg"))
    done = run(command, directory, forks)
    assert done.status == 0, done
    with chdir(directory):
        runpy.run_path(str(EXAMPLE / "serve_and_train.py"))["write_problems"](80 * 64, 400)
    return directory, done.err + done.out


def check_accuracy(printed: str) -> None:
    """GRPO raises the accuracy on problems that are held out."""
    before, after = map(float, re.findall(r"held-out accuracy ([\d.]+)", printed))
    assert before < 0.7 < 0.85 < after, printed


def test_the_example_does_what_its_readme_says(sums, forks):
    directory, printed = sums
    readme = (EXAMPLE / "README.md").read_text()
    done = run(commands(readme)[-1], directory, forks)
    assert done.status == 0, done
    check_readme(readme, printed + done.err + done.out, directory)
    check_accuracy(done.err + done.out)


def test_the_client_of_the_example_learns_on_four_ranks(sums, forks):
    directory, _ = sums
    port = free_port()
    words = ["training-server", "init_from=outputs/sums/checkpoints/sft/step-000016", "device=cpu", "--name", "sums"]
    with forks.start(
        directory, *words, *LAYOUTS[4], "--directory", "outputs/service", "--port", str(port), ranks=4
    ) as server:
        server.wait_until((directory / "outputs" / "service" / "journal").exists, "its journal")
        check_accuracy(run_client(EXAMPLE / "grpo.py", directory, f"http://127.0.0.1:{port}"))
