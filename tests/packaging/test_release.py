"""A release is what its changelog, its page on versions and its workflows say, and trains from the wheel alone."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from rl_megatron import __version__
from rl_megatron.config.checkpoint_metadata import FORMAT

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "versions.md").read_text()


def test_the_changelog_begins_with_this_version_or_with_what_is_not_released():
    sections = re.findall(r"^## (.+)$", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] in ("Unreleased", __version__)
    assert __version__ in sections and len(sections) == len(set(sections))


def test_the_page_on_versions_has_the_format_and_the_pairs_of_the_constraints():
    assert f"Version {__version__} writes and reads format {FORMAT}." in PAGE
    pins = (REPO / "constraints.txt").read_text()
    pairs = {
        python: tuple(
            re.search(rf'^{name}==(\S+); python_version {compared} "3.12"', pins, re.MULTILINE)[1]
            for name in ("megatron-core", "torch")
        )
        for python, compared in (("3.11", "<"), ("3.12", ">="))
    }
    rows = re.findall(r"^\| (3\.\d+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    assert {python: versions for python, *versions in rows} == {python: [*pair] for python, pair in pairs.items()}


def test_every_python_of_the_classifiers_runs_each_night():
    classifiers = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["classifiers"]
    declared = [found[1] for text in classifiers if (found := re.search(r":: Python :: (3\.\d+)$", text))]
    (job,) = yaml.safe_load((REPO / ".github" / "workflows" / "nightly.yml").read_text())["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == declared == re.findall(r"^\| (3\.\d+) \|", PAGE, re.MULTILINE)


@pytest.mark.nightly
def test_a_release_is_built_checked_and_trains_from_its_wheel(tmp_path):
    command, variables = ["bash", REPO / "scripts" / "release.sh", tmp_path / "made"], {"PYTHON": sys.executable}
    finished = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=1500)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    files = [f"rl_megatron-{__version__}-py3-none-any.whl", f"rl_megatron-{__version__}.tar.gz"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == files
    assert finished.stdout.count("PASSED") == 2
    assert f"rl-megatron {__version__}" in finished.stdout and "step-000001" in finished.stdout
    assert all(re.search(rf"^[0-9a-f]{{64}}  {re.escape(file)}$", finished.stdout, re.MULTILINE) for file in files)
