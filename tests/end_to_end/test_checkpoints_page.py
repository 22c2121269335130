"""docs/checkpoints.md: its commands run in its order and do what it says, and its links are valid."""

import re
import shlex

from rl_megatron.config.metrics import HIGHER_IS_BETTER
from tests.end_to_end.launch import TINY
from tests.forkserver import REPOSITORY

PAGE = (REPOSITORY / "docs" / "checkpoints.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SMALLER = [
    *(key for key in TINY if not key.startswith(("train.steps", "output_dir"))),
    "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=4",
]  # fmt: skip


def test_the_commands_of_the_page_run(tmp_path, forks):
    for command in COMMANDS:
        words = shlex.split(command)
        assert words[0] == "rl-megatron"
        if words[1] == "train":
            words += [key for key in SMALLER if "grpo" in command or not key.startswith("algorithm.")]
        done = forks.run(tmp_path, *words[1:])
        assert done.status == 0, (command, done)
        if words[1:] == ["inspect", "outputs/saved"]:
            assert "newest" in done.out and "best accuracy" in done.out
    step = tmp_path / "outputs" / "saved" / "checkpoints" / "sft" / "step-000006"
    kinds = {re.sub(r"\d+", "R", path.name, count=1) for path in step.iterdir()}
    assert kinds == set(
        re.findall(r"`([\w.]+\.\w+|\.metadata)`", "".join(re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)))
    )


def test_the_links_and_the_eval_metric_of_the_page_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)(?:#\w+)?\)", PAGE):
        assert (REPOSITORY / "docs" / target).exists(), target
    assert "`nll_per_token`" in PAGE and "nll_per_token" in HIGHER_IS_BETTER
