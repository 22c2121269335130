"""Every command and every Python block of the pages runs, or says in tables.py why it does not."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from rl_megatron.config.loading.load import load_config
from rl_megatron.config.schema import ALGORITHM_CONFIGS
from tests.docs import checks, learning, tables
from tests.docs.collector import Block, blocks, commands, pages
from tests.docs.forked import Fork, run_block
from tests.docs.small_runs import LIMITS

PAGES = pages()
ALL_COMMANDS = [command for page in PAGES for command in checks.page_commands(page)]
PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python" and block.title is None]


def unique(found):
    """Return the commands without those whose words another page has already."""
    return list({command.words: command for command in reversed(found)}.values())[::-1]


HERE = [command for command in ALL_COMMANDS if checks.covering_test(command.page) is None]
OURS = [command for command in unique(HERE) if command.arguments is not None]
FAST = ("README.md", "docs/quickstart.md")  # what a newcomer types first; the other pages are checked in the full tier


@pytest.mark.parametrize(
    "page",
    [
        page if page in FAST else pytest.param(page, marks=pytest.mark.change)
        for page in dict.fromkeys(command.page for command in OURS)
    ],
)
def test_the_commands_of_a_page_pass_all_checks_before_the_first_step(page, tmp_path, forks):
    found = [command for command in OURS if command.page == page]
    with Fork(forks.context, tmp_path) as fork:
        failures = fork.call(checks.failures_before_the_first_step, found, tmp_path, blocks(page))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page", sorted({command.page for command in ALL_COMMANDS}))
def test_every_other_command_is_known_and_its_files_exist(page):
    for command in checks.page_commands(page):
        assert not checks.missing_files(command), f"{command.place}: {command.text}: there is no such file"
        assert checks.is_known(command), (
            f"{command.place}: {command.text}: add it to NOT_RUN in tests/docs/tables.py, with the reason"
        )


@pytest.mark.change
@pytest.mark.parametrize("page", [page for page in PAGES if checks.runs_in_order(page)])
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, forks):
    checks.run_page(page, tmp_path, forks)


@pytest.mark.change
@pytest.mark.parametrize(
    "page", sorted({block.page for block in PYTHON if checks.is_run(block) and not checks.runs_in_order(block.page)})
)
def test_the_python_blocks_of_a_page_run(page, tmp_path, forks):
    for block in blocks(page):
        checks.write_titled(block, tmp_path)
    with Fork(forks.context, tmp_path) as fork:
        for block in PYTHON:
            if block.page == page and checks.is_run(block):
                checks.run_python(fork, block, tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if checks.covering_test(page)])
def test_the_other_test_names_the_page(page):
    stem = page.rpartition("/")[2].removesuffix(".md")
    assert re.search(rf"\b{stem}\b", checks.covering_test(page).read_text()), f"it does not run {page}"


def test_the_tables_name_what_the_pages_have():
    for pattern in tables.TOO_LONG_TO_RUN:
        assert any(re.search(pattern, command.text) for command in ALL_COMMANDS), f"no page has {pattern}"
    keys = {checks.not_run_key(block) for block in PYTHON}
    assert {key for key in tables.PYTHON_NOT_RUN if key.partition(":")[0] in PAGES} <= keys


def block_of(text):
    return Block("page.md", 10, "bash", None, text)


def test_the_collector_reads_shell_as_bash_does():
    found = commands(
        block_of(
            "# a comment\n"
            "rl-megatron train \\\n    train.steps=2   # two steps\n"
            "NPROC_PER_NODE=2 scripts/train.sh train && ls outputs | head -n 1\n"
            "torchrun --nnodes=2 --nproc-per-node 4 -m rl_megatron certify 'data.prompt_template=\"{question}\"'\n"
            "cat > file.py <<'EOF'\nrl-megatron is not a command here\nEOF\n"
        )
    )
    assert [(command.line, command.words, command.ranks, command.arguments) for command in found] == [
        (11, ("rl-megatron", "train", "train.steps=2"), 1, ("train", "train.steps=2")),
        (13, ("scripts/train.sh", "train"), 2, ("train",)),
        (13, ("ls", "outputs"), None, None),
        (
            14,
            ("torchrun", "--nnodes=2", "--nproc-per-node", "4", "-m", "rl_megatron", "certify",
             'data.prompt_template="{question}"'),
            8,
            ("certify", 'data.prompt_template="{question}"'),
        ),
        (15, ("cat",), None, None),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="page.md:10: .* cannot be read as shell"):
        commands(block_of("rl-megatron train data.prompt_template='a\n"))


TRAINING = """
import torch
from rl_megatron import BatchedDataDict, MegatronPolicy, ModelConfig, NLLLoss, OptimizerConfig, start_topology

model = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, num_query_groups=2)
ids = torch.arange(12).view(2, 6)
batch = BatchedDataDict(input_ids=ids, token_mask=torch.ones(2, 6), sample_mask=torch.ones(2))
optimizer = OptimizerConfig(lr=1e-3, decay_style="cosine", decay_steps=STEPS)
policy = MegatronPolicy(model, start_topology(device="cpu"), vocab_size=12, optimizer=optimizer)
losses = [policy.train(batch, NLLLoss())["loss"] for _ in range(4)]
"""


@pytest.mark.change
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRAINING.replace("STEPS", "10"), None),
        (TRAINING.replace("STEPS", "1"), r"steps \[1, 2, 3\] move no weight, at learning rate 0"),
        (TRAINING.replace("STEPS", "10").replace("range(4)", "range(1)"), "1 of 1 steps with NLLLoss have a gradient"),
        (TRAINING.replace("STEPS", "10").replace("range(4)", "range(0)"), "has taken no optimizer step"),
    ],
    ids=["learns", "learning rate 0 after the first step", "one step", "no step"],
)
def test_a_block_that_trains_has_to_learn_after_its_first_step(tmp_path, forks, text, message):
    block = dataclasses.replace(block_of(text), language="python")
    with Fork(forks.context, tmp_path) as fork:
        if message is None:
            checks.run_python(fork, block, tmp_path)
        else:
            with pytest.raises(AssertionError, match=message):
                checks.run_python(fork, block, tmp_path)


def test_steps_that_lower_no_loss_are_named(tmp_path):
    def steps(*falls):
        made = [learning.Step("1", "NLLLoss", 2.0, 2.0 - fall, 0.1, 1e-3, 1.0) for fall in falls]
        learning.steps_file(tmp_path).write_text("".join(json.dumps(dataclasses.asdict(step)) + "\n" for step in made))

    steps(0.5, 0.2, 0.1)
    learning.check_learning("page", tmp_path, {})
    steps(0.5, 0.2, -0.3)
    with pytest.raises(AssertionError, match="falls by 0.5 in the first step, and by -0.1 in the 2 steps after it"):
        learning.check_learning("page", tmp_path, {})
    learning.check_learning("page", tmp_path, {})  # the steps are forgotten


def test_a_wrong_command_is_named(tmp_path, forks):
    wrong = {
        "rl-megatron train train.stpes=3": "did you mean 'train.steps'",
        "torchrun --nproc-per-node 3 -m rl_megatron train parallel.tensor=2": "does not divide the world size 3",
        "rl-megatron train data=gsm8k data.path=nowhere": "nothing at",
        "rl-megatron inspect --tensor": "unknown options|unrecognized|SystemExit",
        "rl-megatron trian": "invalid choice: 'trian'",
    }
    found = commands(block_of("\n".join(wrong)))
    with Fork(forks.context, tmp_path) as fork:
        failures = fork.call(checks.failures_before_the_first_step, found, tmp_path, [])
    assert len(failures) == len(wrong)
    for failure, (command, message) in zip(failures, wrong.items(), strict=True):
        assert command in failure and re.search(message, failure), failure


def test_a_program_that_nobody_knows_is_named():
    (command,) = commands(block_of("frobnicate --all"))
    assert not checks.is_known(command)


def test_small_runs_limit_keys_that_exist():
    for section, limits in LIMITS.items():
        if section == "algorithm":
            keys = {field.name for config in ALGORITHM_CONFIGS.values() for field in dataclasses.fields(config)}
        else:
            keys = {field.name for field in dataclasses.fields(getattr(load_config([]).first, section))}
        assert limits.keys() <= keys, section


def test_a_python_block_that_raises_is_named(tmp_path, forks):
    with Fork(forks.context, tmp_path) as fork:
        fork.call(run_block, block_of("number = 1\n"))
        with pytest.raises(AssertionError, match=r'File "page.md", line 11.*\n.*ZeroDivisionError'):
            fork.call(run_block, block_of("assert number == 1\nnumber / 0\n"))
