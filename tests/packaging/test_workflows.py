"""The workflows of GitHub and the hooks before a commit: they are well formed, and call only scripts that exist."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
HOOKS = REPOSITORY / ".pre-commit-config.yaml"


def test_workflows_fit_the_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    found = subprocess.run(command, capture_output=True, text=True)
    assert WORKFLOWS and found.returncode == 0, found.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_one_script_and_keeps_what_tests_cost(workflow):
    (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    assert (REPOSITORY / command.split()[0]).is_file()
    (kept,) = (step for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    assert kept["if"] == "always()"


def test_nightly_runs_every_shard():
    (job,) = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "nightly.yml").read_text())["jobs"].values()
    shards = job["strategy"]["matrix"]["shard"]
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    assert shards == list(range(1, len(shards) + 1)) and command.endswith(f"/{len(shards)}")


def test_hooks_are_well_formed_and_name_tests_that_exist():
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", HOOKS], check=True)
    hooks = [hook for repository in yaml.safe_load(HOOKS.read_text())["repos"] for hook in repository["hooks"]]
    words = [word for hook in hooks for word in hook.get("entry", "").split()]
    tests = [word for word in words if word.startswith(("tests/", "scripts/"))]
    assert tests and all((REPOSITORY / word).exists() for word in tests)
