"""The wheel that `pip install` installs: it holds every configuration and runs from any directory."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.change
REPO = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "outputs", "__pycache__", "*.egg-info")
SHORT = """stages.pretrain.train.steps=2 stages.sft.train.steps=1 stages.grpo.train.steps=1 data.num_documents=500
    data.num_eval_examples=4 stages.grpo.algorithm.prompts_per_step=4 stages.grpo.train.global_batch_size=32"""


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the tree, without the files of earlier builds, and return its path."""
    directory = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPO, directory / "tree", ignore=NOT_SOURCES)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", directory, directory / "tree", cwd=directory)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel in a new environment, which a path file gives the running environment's packages.

    Returns:
        The environment's bin directory.
    """
    directory = tmp_path_factory.mktemp("installed")
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    offline = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel, cwd=directory)
    (packages,) = directory.glob("lib/python3.*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in dependencies))
    return python.parent


def test_the_wheel_holds_only_the_package_and_every_configuration(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(REPO).as_posix() for path in (REPO / "rl_megatron").rglob("*.py")}
    configs = {f"rl_megatron/{path.relative_to(REPO).as_posix()}" for path in (REPO / "configs").rglob("*.yaml")}
    assert "rl_megatron/configs/experiment/quickstart.yaml" in configs
    types = {"rl_megatron/py.typed", "rl_megatron/__init__.pyi"}
    assert held == modules | configs | types


def test_the_console_script_trains_from_an_empty_directory(installed, tmp_path):
    where = run(installed / "python", "-c", "import rl_megatron; print(rl_megatron.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    run(installed / "rl-megatron", "train", "experiment=quickstart", *SHORT.split(), cwd=tmp_path)
    summary = json.loads((tmp_path / "outputs" / "quickstart" / "summary.json").read_text())
    assert list(summary["stages"]) == ["pretrain", "sft", "grpo"]
    assert summary["world_size"] == 1


def test_bad_input_gives_exit_status_2_and_no_traceback(installed, tmp_path):
    command = [installed / "rl-megatron", "train", "experiment=quickstart", "train.seeed=1"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert "train.seed" in finished.stderr and "Traceback" not in finished.stderr
