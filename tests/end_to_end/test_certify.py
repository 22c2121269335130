"""`rl-megatron certify`: what it prints, how it ends, and that a wrong gradient does not pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.end_to_end.launch import REPOSITORY, TIMEOUT, command, environment

# Each wraps something on the ranks of the layout; the reference is a process of its own, which stays right.
WRONG = {
    "the loss": (
        "loss of sft",
        "from rl_megatron.execution.runner import Runner\n"
        "right = Runner._loss_of\n"
        "def wrong(self, *args, **kwargs):\n"
        "    loss, count, report = right(self, *args, **kwargs)\n"
        "    return 2 * loss, count, report | {'loss': 2 * report['loss']}\n"
        "Runner._loss_of = wrong\n",
    ),
    "the gradient alone": (
        "gradient of sft",
        "from rl_megatron.execution.runner import Runner\n"
        "right = Runner._loss_of\n"
        "def wrong(self, *args, **kwargs):\n"
        "    loss, count, report = right(self, *args, **kwargs)\n"
        "    return 2 * loss, count, report\n"
        "Runner._loss_of = wrong\n",
    ),
    "attention": (
        "loss of sft",
        "from rl_megatron.model import attention\n"
        "right = attention.attend\n"
        "attention.attend = lambda *args: 1.01 * right(*args)\n",
    ),
}  # fmt: skip


def certify_with(tmp_path, breakage: str, *arguments: str) -> subprocess.CompletedProcess:
    script = tmp_path / "certify.py"
    run = f"from rl_megatron.cli import main\nraise SystemExit(main({['certify', *arguments]!r}))\n"
    script.write_text(breakage + run)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip


def test_a_layout_that_holds(tmp_path):
    leaner = ("train.batching=packed", "train.fused_head=true", "optimizer.overlap=true")
    done = command(tmp_path, "certify", "experiment=quickstart", "parallel.tensor=2", *leaner, ranks=2)
    assert done.status == 0, done.err
    assert "fused head, overlapped, cpu; against one process" in done.out
    assert "This layout gives what one process gives" in done.out and "DIFFERS" not in done.out
    for said in (
        "pretrain, sft",
        "grpo",
        "standard dpo",
        "standard value",
        "gradient",
        "weights after a step",
        "logprobs",
        "packed",
        "token",
    ):
        assert said in done.out
    assert {path.name for path in tmp_path.iterdir()} == {"stdout.txt", "stderr.txt"}, "it leaves nothing behind"


def test_a_reference_that_fails_ends_every_rank(tmp_path):
    # The module that the other process is to run.
    breakage = "from rl_megatron.certify import reference\nreference.__name__ = 'rl_megatron.certify.nowhere'\n"
    done = certify_with(tmp_path, breakage, "parallel.tensor=2")
    assert done.returncode == 1 and done.stderr.count("RuntimeError: the reference process failed") >= 2


def test_experts_that_balance_are_certified_without_that(tmp_path):
    overrides = ("model=nano_moe", "model.router_aux_loss=0.01", "parallel.context=2", "parallel.expert=2")
    done = command(tmp_path, "certify", *overrides, "train.batching=packed", ranks=2)
    assert done.status == 0, done.out + done.err


def test_the_documented_layout_of_eight_ranks_holds(tmp_path):
    degrees = ("parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2")
    assert f"certify {' '.join(degrees)}" in (REPOSITORY / "README.md").read_text()
    done = command(tmp_path, "certify", *degrees, ranks=8)
    assert done.status == 0, done.err
    assert "8 rank(s): tensor 2 × pipeline 2 × context 2 × data 1" in " ".join(done.out.split())
    assert "This layout gives what one process gives" in done.out


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_scaling_is_named(tmp_path, what):
    first, breakage = WRONG[what]
    done = certify_with(tmp_path, breakage, "parallel.context=2")
    assert f"does NOT give what one process gives: {first} differs by" in " ".join(done.stdout.split()), done.stderr
    assert done.returncode == 1 and "DIFFERS" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.tensor=3"], "parallel.tensor=3"),
        (["parallel.expert=2"], "parallel.expert=2"),
        (["algorithm=dpo", "data=gsm8k_pairs", "data.path=x", "loss=draft_cross_entropy"], "use dpo or ipo"),
        (["algorithm=grpo", "loss.ratio_clip_min=abc"], "ratio_clip_min='abc'"),
        (["algorithm=grpo", "loss.name=clipped_gp"], "clipped_pg"),
    ],
    ids=["degrees", "experts", "a loss of no pairs", "a wrong value", "a mistyped loss"],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_a_line(tmp_path, forks, overrides, said):
    refused = forks.run(tmp_path, "certify", *overrides)
    assert refused.status == 2 and refused.err.startswith("error: ") and said in refused.err, refused.err
    assert refused.err.count("\n") == 1
