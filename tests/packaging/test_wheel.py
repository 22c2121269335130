"""The wheel that `pip install` installs: it holds every configuration and runs from any directory."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from rl_megatron import __version__

pytestmark = pytest.mark.change
REPO = Path(__file__).resolve().parents[2]
SHORT = """stages.pretrain.train.steps=2 stages.sft.train.steps=1 stages.grpo.train.steps=1 data.num_documents=500
    data.num_eval_examples=4 stages.grpo.algorithm.prompts_per_step=4 stages.grpo.train.global_batch_size=32"""


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


def list_sources():
    """Return the paths of the repository's files, without what git ignores."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPO)
    return {name for name in listed.splitlines() if (REPO / name).is_file()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build the source distribution from a copy of the tree, without the files of earlier builds, and unpack it."""
    directory = tmp_path_factory.mktemp("sdist")
    for name in list_sources():
        (directory / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / name, directory / "tree" / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(directory)!r})"
    run(sys.executable, "-c", build, cwd=directory / "tree")
    (built,) = directory.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(directory, filter="data")
    return directory / built.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Build the wheel from the source distribution, and return its path."""
    directory = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", directory, sdist, cwd=directory)
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


def test_the_source_distribution_holds_every_file_of_the_repository(sdist):
    held = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert sdist.name == f"rl_megatron-{__version__}"
    assert list_sources() - held == set()
    assert {name for name in held - list_sources() if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}


def test_the_metadata_are_those_of_pyproject_and_of_setup(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"rl_megatron-{__version__}.dist-info/METADATA").decode()
        commands = archive.read(f"rl_megatron-{__version__}.dist-info/entry_points.txt").decode()
    metadata = message_from_string(text)
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist", [])
    assert "megatron-core<0.20,>=0.16.1" in requirements and 'trl<1.17,>=1.16; extra == "dev"' in requirements
    assert not [name for name in requirements if name.startswith(("build", "twine"))]
    assert metadata.get_payload().startswith("# rl_megatron")
    assert "rl-megatron = rl_megatron.cli:main" in commands and "[vllm.general_plugins]" in commands


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
