"""The pages of docs/tutorials show their example files as they are; tests/end_to_end/test_examples.py runs them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from tests.end_to_end.page_commands import blocks, commands
from tests.forkserver import REPOSITORY, environment

DIRECTORY = REPOSITORY / "docs" / "tutorials"
PAGES = sorted(path.stem for path in DIRECTORY.glob("*.md"))
EXAMPLES = REPOSITORY / "examples"
# The files of pages whose experiments are part of the package, where others have a directory in examples/.
SHIPPED = {"multi_turn": (REPOSITORY / "configs" / "experiment", REPOSITORY / "rl_megatron" / "rollouts" / "examples")}

GUIDES = {"reward_model_ppo": REPOSITORY / "docs" / "reward_models.md"}  # the pages of examples that are no tutorials


@pytest.mark.parametrize("page", PAGES)
def test_code_of_the_page_is_in_its_example(page):
    text = (DIRECTORY / f"{page}.md").read_text()
    for language, suffix in (("python", "py"), ("yaml", "yaml"), ("json", "jsonl")):
        directories = SHIPPED.get(page, (EXAMPLES / page,))
        files = [path.read_text() for directory in directories for path in sorted(directory.rglob(f"*.{suffix}"))]
        for block in blocks(text, language):
            assert any(block in file for file in files), f"{page}.md shows what is not in its example:\n{block}"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_short_and_its_links_lead_somewhere(page):
    text = (DIRECTORY / f"{page}.md").read_text()
    assert len(text.splitlines()) < 150
    assert commands(text)
    for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[\w-]+)?\)", text):
        assert (DIRECTORY / target).exists(), target


def test_every_example_has_a_page_and_no_file_is_unused():
    # tests/packaging/test_cluster_files.py checks the files for clusters.
    found = sorted(path.name for path in EXAMPLES.iterdir() if path.name != "cluster")
    assert found == sorted([*(page for page in PAGES if page not in SHIPPED), *GUIDES])
    pages = "".join(path.read_text() for path in (*(DIRECTORY / f"{name}.md" for name in PAGES), *GUIDES.values()))
    for page in found:
        for path in (EXAMPLES / page).rglob("*"):
            if path.suffix == ".py":
                assert path.name in pages, path
            elif path.suffix == ".yaml":
                assert isinstance(yaml.safe_load(path.read_text()), dict) and f"experiment={path.stem}" in pages, path


def test_metrics_that_differ_end_the_comparison_with_status_1(tmp_path):
    for name, loss in (("one", 2.0), ("near", 2.0001), ("far", 2.001)):
        (tmp_path / name).mkdir()
        line = f'{{"stage": "sft", "step": 1, "kind": "train", "loss": {loss}, "grad_norm": 1.0}}\n'
        (tmp_path / name / "metrics.jsonl").write_text(line)
    compare = [sys.executable, str(EXAMPLES / "scale_out" / "compare_metrics.py"), "one"]
    for other, status in (("near", 0), ("far", 1)):
        done = subprocess.run(
            [*compare, other], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done
