"""`rl-megatron certify`: what it prints, how it ends, and that a wrong gradient does not pass."""

from __future__ import annotations

import pytest

from tests.end_to_end.launch import command
from tests.forkserver import REPOSITORY

# Each breaks something on the ranks of the layout; the reference is a process of its own, which stays right.


def double_the_loss() -> None:
    from rl_megatron.execution.runner import Runner

    right = Runner._loss_of

    def wrong(self, *args, **kwargs):
        loss, count, report = right(self, *args, **kwargs)
        return 2 * loss, count, report | {"loss": 2 * report["loss"]}

    Runner._loss_of = wrong


def double_the_gradient_alone() -> None:
    from rl_megatron.execution.runner import Runner

    right = Runner._loss_of

    def wrong(self, *args, **kwargs):
        loss, count, report = right(self, *args, **kwargs)
        return 2 * loss, count, report

    Runner._loss_of = wrong


def scale_attention() -> None:
    from rl_megatron.model.layers import attention

    right = attention.attend
    attention.attend = lambda *args: 1.01 * right(*args)


def lose_the_reference() -> None:
    """Name a module that does not exist as the one that the other process is to run."""
    from rl_megatron.certify import single_process

    single_process.__name__ = "rl_megatron.certify.nowhere"


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


def test_a_reference_that_fails_ends_every_rank(tmp_path, forks):
    done = forks.run_ranks(tmp_path, "certify", "parallel.tensor=2", ranks=2, before=lose_the_reference)
    assert [rank.status for rank in done] == [1, 1]
    assert all("RuntimeError: the reference process failed" in rank.err for rank in done), done


def test_experts_that_balance_are_certified_without_that(tmp_path, forks):
    overrides = ("model=nano_moe", "model.router_aux_loss=0.01", "parallel.context=2", "parallel.expert=2")
    done = forks.run_ranks(tmp_path, "certify", *overrides, "train.batching=packed", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done


def test_the_documented_layout_of_eight_ranks_holds(tmp_path, forks):
    degrees = ("parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2")
    assert f"certify {' '.join(degrees)}" in (REPOSITORY / "README.md").read_text()
    done = forks.run_ranks(tmp_path, "certify", *degrees, ranks=8)
    assert [rank.status for rank in done] == [0] * 8, done
    assert "8 rank(s): tensor 2 × pipeline 2 × context 2 × data 1" in " ".join(done[0].out.split())
    assert "This layout gives what one process gives" in done[0].out


@pytest.mark.parametrize(
    ("breakage", "first"),
    [
        (double_the_loss, "loss of sft"),
        (double_the_gradient_alone, "gradient of sft"),
        (scale_attention, "loss of sft"),
    ],
    ids=["the loss", "the gradient alone", "attention"],
)
def test_a_wrong_scaling_is_named(tmp_path, forks, breakage, first):
    done = forks.run_ranks(tmp_path, "certify", "parallel.context=2", ranks=2, before=breakage)
    said = f"does NOT give what one process gives: {first} differs by"
    assert said in " ".join(done[0].out.split()), done[0].err
    assert [rank.status for rank in done] == [1, 1] and "DIFFERS" in done[0].out


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
