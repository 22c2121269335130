"""The examples have a README of one form, and the pages show their files as they are.

tests/end_to_end/test_examples.py runs the commands of the tutorials and of the READMEs.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext

import pytest

from rl_megatron.cli.parser import build_parser
from rl_megatron.config.checkpoint_metadata import HUGGING_FACE
from rl_megatron.config.loading.load import load_config
from tests.docs import inputs
from tests.docs.forked import Fork
from tests.end_to_end.page_commands import blocks, check_readme, commands, repository_in
from tests.forkserver import REPOSITORY, environment

DIRECTORY = REPOSITORY / "docs" / "tutorials"
PAGES = sorted(path.stem for path in DIRECTORY.glob("*.md"))
EXAMPLES = REPOSITORY / "examples"
READMES = sorted(EXAMPLES.glob("*/README.md"))
QUESTION = re.compile(r"# (How do I [^\n]+\?)\n")
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


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_a_readme_has_a_question_commands_what_they_print_a_time_and_a_page(readme):
    text = readme.read_text()
    assert len(text.splitlines()) <= 15
    assert QUESTION.match(text)
    (code,), (printed,) = blocks(text, "bash"), blocks(text, "text")
    assert text.index(code) < text.index(printed) < text.index("\nTime: ")
    if readme.parent.name != "cluster":  # no cluster was at hand
        assert re.search(r"^Time: (\d+ seconds|[\w ]*minutes?)\b.* on two CPU cores", text, re.MULTILINE)
    targets = re.findall(r"\]\((?!http)([^)#]+)(?:#[\w-]+)?\)", text)
    assert all((readme.parent / target).exists() for target in targets), targets
    assert any(target.startswith("../../docs/") for target in targets)


def test_a_tutorial_has_the_commands_of_its_readme():
    for page in set(PAGES) - SHIPPED.keys():
        own = commands((EXAMPLES / page / "README.md").read_text())
        assert set(own) <= set(commands((DIRECTORY / f"{page}.md").read_text())), page


def test_the_home_page_lists_the_examples_with_their_questions():
    (table,) = re.findall(r"^## Examples\n(.*?)^## ", (REPOSITORY / "docs" / "index.md").read_text(), re.M | re.S)
    listed = dict(re.findall(r"^\| ([^|]+\?) \| \[examples/(\w+)\]\(\.\./examples/\2/README\.md\) \|$", table, re.M))
    assert listed == {QUESTION.match(path.read_text())[1]: path.parent.name for path in READMES}
    assert sorted(listed.values()) == sorted(path.name for path in EXAMPLES.iterdir())


def test_no_file_is_unused():
    """A file of an example is named in its README, in its page, or in another file of the example."""
    for example in EXAMPLES.iterdir():
        files = [path for path in example.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        pages = [REPOSITORY / "docs" / "tutorials" / f"{example.name}.md", GUIDES.get(example.name)]
        texts = {path: path.read_text() for path in (*files, *pages) if path is not None and path.is_file()}
        for path in set(files) - {example / "README.md"}:
            name = f"experiment={path.stem}" if path.parent.name == "experiment" else path.name
            assert any(name in text for other, text in texts.items() if other != path), path


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


def test_the_page_on_agents_shows_the_agent_of_its_example():
    assert (EXAMPLES / "agent" / "agent.py").read_text() in (REPOSITORY / "docs" / "agents.md").read_text()


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("The `reward` rises above 0.5:\n```text\nstep 1: reward 0.25\nstep 2\n```", None),
        ("The `reward` rises above 0.5:\n```text\nstep 2\nstep 1: reward 0.25\n```", "is not printed"),
        ("The `reward` rises above 0.5:\n```text\nstep 1: accuracy 0.25\n```", "is not printed"),
        ("The `reward` rises above 0.8:\n```text\nstep 1\n```", "changes from 0.3 to 0.7"),
        ("The `reward` rises above 0.2:\n```text\nstep 1\n```", "changes from 0.3 to 0.7"),
        ("The `reward` falls below 0.5:\n```text\nstep 1\n```", "changes from 0.3 to 0.7"),
        ("The held-out `reward` rises above 0.5:\n```text\nstep 1\n```", "changes from 0.4 to 0.4"),
    ],
)
def test_a_readme_that_says_something_else_is_noticed(says, message, tmp_path):
    steps = [
        {"stage": "grpo", "step": step, "kind": "train", "reward": reward} for step, reward in enumerate((0.3, 0.7))
    ]
    lines = [{"stage": "sft", "kind": "train", "reward": 0.9}, *steps, {"stage": "grpo", "kind": "eval", "reward": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    printed = "step 1: reward 0.3  loss 2\nstep 2: loss -1e-3\nWritten to .\n"
    with nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        check_readme(f"{says}\n", printed, tmp_path)


@pytest.mark.change
def test_the_configurations_of_the_readmes_are_valid(tmp_path, forks):
    """Nightly runs the commands. This test notices a renamed key before."""
    directory = repository_in(tmp_path)
    with Fork(forks.context, directory) as fork:
        for readme in READMES:
            for experiment in (readme.parent / "experiment").glob("*.yaml"):
                for checkpoint in re.findall(r"^init_from: (.*)$", experiment.read_text(), re.MULTILINE):
                    inputs.checkpoint_without_weights(directory / checkpoint)
                    inputs.tokenizer(directory / checkpoint / HUGGING_FACE)
            for command in commands(readme.read_text()):
                _, is_run, overrides = command.partition(" train ")
                for extra in fork.call(list_extras, shlex.split(overrides)) if is_run else ():
                    assert f"`{extra}`" in readme.read_text(), f"{readme} does not name the extra {extra}"


EXTRAS = {
    "tools": lambda rollout: rollout.tools.functions,
    "gateway": lambda rollout: rollout.worker == "agent",
    "data": lambda rollout: rollout.async_enabled,
}


def list_extras(arguments: list[str]) -> list[str]:
    """Compose the configuration of `rl-megatron train` with these arguments, and return the extras that it needs."""
    parsed, rest = build_parser().parse_known_args(["train", *arguments])
    stages = load_config(parsed.overrides + rest, parsed.config_dir, parsed.config_name).stages.values()
    return [extra for extra, needs in EXTRAS.items() if any(needs(stage.rollout) for stage in stages)]
