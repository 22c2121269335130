"""What people see of a run: on a terminal of 80 columns, in a log file, when it is started again, and at its end."""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios

import pytest
import yaml

from tests.end_to_end.launch import TIMEOUT, TINY, command
from tests.forkserver import environment

LOG_LINE = re.compile(r"\d\d:\d\d:\d\d .*")
CONTROL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
GRPO = ("train", *TINY, "algorithm=grpo", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")
API = """
from rl_megatron import EmbeddedEngine, MegatronPolicy, ModelConfig, OptimizerConfig, Sampling
from rl_megatron import build_loss, generate, start_topology

policy = MegatronPolicy(ModelConfig(), start_topology(), vocab_size=260, optimizer=OptimizerConfig(lr=1e-4))
rollouts = generate(EmbeddedEngine(policy), [[5, 6, 7], [8, 9]], Sampling(max_new_tokens=4), seed=0)
rollouts["prev_logprobs"] = policy.get_logprobs(rollouts)["logprobs"]
rollouts["advantages"] = rollouts["token_mask"] * 1.0
policy.train(rollouts, build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0}))
print("done")
"""


def on_a_terminal(directory, *arguments, columns=80, status=0):
    """Run the real command on a terminal of this width; return what it drew, as the lines between returns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    run = [sys.executable, "-m", "rl_megatron", *arguments]
    known = environment() | {"TERM": "xterm"}
    process = subprocess.Popen(run, cwd=directory, env=known, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            drawn += os.read(ours, 65536)
        except OSError:  # the end of the last process that has the terminal
            break
    os.close(ours)
    assert process.wait(TIMEOUT) == status, drawn.decode()
    return re.split(r"[\r\n]+", CONTROL_CODE.sub("", drawn.decode()))


@pytest.mark.fast
def test_a_run_on_a_terminal_of_80_columns(tmp_path):
    drawn = on_a_terminal(tmp_path, *GRPO, "train.steps=4", "data.num_eval_examples=64")
    lines = [line for line in drawn if re.match(r"grpo \d/4", line)]
    assert lines and all(len(line) <= 80 and "…" not in line for line in lines)
    assert all(re.search(r" \d:\d\d:\d\d( |$)", line) for line in lines)
    assert all(
        re.search(r" ETA [-\d]:[-\d]{2}:[-\d]{2}( |$)", line) for line in lines if not line.startswith("grpo 4/4")
    )
    assert re.search(r"grpo 4/4 ━+ \d:\d\d:\d\d reward [\d.e-]+$", lines[-1])
    assert any(re.match(r"grpo step 4: held-out accuracy ", line) for line in drawn)
    assert not [line for line in drawn if "arning" in line]


def test_an_error_is_the_last_thing_on_a_terminal(tmp_path):
    """Not the progress line of the stage that failed."""
    drawn = on_a_terminal(tmp_path, "train", *TINY, "optimizer.lr=1e30", "optimizer.clip_grad=0", status=1)
    last = [line for line in drawn if line.strip()][-2:]
    assert last[0].startswith("sft ") and last[1].startswith("error: stage sft, step ")


def test_two_ranks_write_plain_lines_and_no_warnings_of_libraries(tmp_path):
    done = command(tmp_path, *GRPO, "parallel.tensor=2", ranks=2)
    assert done.status == 0, done.err
    assert all(LOG_LINE.fullmatch(line) for line in done.err.splitlines()), done.err
    assert "\x1b" not in done.out and "\r" not in done.out
    assert re.search(r"^grpo step 3/3: reward \S+  loss \S+  .*\(\d:\d\d:\d\d, ETA 0:00:00\)$", done.out, re.MULTILINE)


def test_the_python_interface_passes_on_no_warnings_that_users_cannot_act_on(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", API], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_what_a_run_says_to_do_next_can_be_done(tmp_path, forks):
    done = forks.run(tmp_path, *GRPO)
    assert done.status == 0, done.err
    commands = [shlex.split(line) for line in done.out.splitlines() if line.startswith("    rl-megatron ")]
    assert [words[1] for words in commands] == ["inspect", "convert", "train"]
    for _, *arguments in commands:
        more = [o for o in TINY if not o.startswith(("output_dir", "model.", "tokenizer"))]
        then = forks.run(tmp_path, *arguments, *(more if arguments[0] == "train" else ()))
        assert then.status == 0, (arguments, then.err)
    assert (tmp_path / "out" / "exported" / "grpo" / "config.json").is_file()
    assert (tmp_path / "out-next" / "checkpoints" / "sft" / "step-000003").is_dir()


def test_a_run_that_goes_on_says_from_where(tmp_path, forks):
    for steps in (2, 4):
        done = forks.run(tmp_path, "train", *TINY, f"train.steps={steps}")
        assert done.status == 0, done.err
    assert "stage sft: resuming after step 2 of 4, from out/checkpoints/sft/step-000002" in done.err
    assert "apply from here on: train.steps: 2 → 4" in done.err


def test_a_finished_run_is_not_rewritten_by_other_settings(tmp_path, forks):
    assert forks.run(tmp_path, "train", *TINY).status == 0
    before = (tmp_path / "out" / "config.yaml").read_text()
    refused = forks.run(tmp_path, "train", *TINY, "train.seed=7", "optimizer.lr=0.5")
    assert refused.status == 2
    assert "holds a run with other settings (optimizer.lr: 0.001 → 0.5, train.seed: 0 → 7)" in refused.err
    again = forks.run(tmp_path, "train", *TINY, "train.save_every=1")
    assert again.status == 0
    assert "stage sft: skipped, it is complete at step 3: out/checkpoints/sft/step-000003" in again.err
    assert "settings that changed have no effect on it: train.save_every: 0 → 1" in again.err
    assert (tmp_path / "out" / "config.yaml").read_text() == before


def test_under_torchrun_everything_is_printed_once(tmp_path, forks):
    shown = forks.run_ranks(tmp_path, "train", "experiment=quickstart", "--print-config", ranks=2)
    assert list(yaml.safe_load(shown[0].out)["stages"]) == ["pretrain", "sft", "grpo"]
    for arguments in (["train", "train.stpes=1"], ["trian"], ["inspect", "nowhere"], ["--help"]):
        first, second = forks.run_ranks(tmp_path, *arguments, ranks=2)
        assert first.out + first.err and second.out == second.err == ""
        assert arguments == ["--help"] or first.status == 2
    assert shown[1].out == shown[1].err == ""
