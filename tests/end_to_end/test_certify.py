"""`rl-megatron certify`: its output, its exit status, and that it finds wrong losses and gradients."""

from __future__ import annotations

import pytest

from tests.forkserver import REPOSITORY

# Each of these functions breaks something on the ranks of the layout. The reference runs in another process, so that it
# stays correct.


def double_the_loss() -> None:
    from rl_megatron.losses import NLLLoss

    right = NLLLoss.evaluate

    def wrong(self, *args, **streams):
        loss, metrics = right(self, *args, **streams)
        return 2 * loss, metrics

    NLLLoss.evaluate = wrong


def double_the_gradient_only() -> None:
    from rl_megatron.losses import NLLLoss

    right = NLLLoss.evaluate

    def wrong(self, *args, **streams):
        loss, metrics = right(self, *args, **streams)
        return 2 * loss - loss.detach(), metrics

    NLLLoss.evaluate = wrong


def scale_attention() -> None:
    from rl_megatron.model.layers import attention

    right = attention.attend
    attention.attend = lambda *args: 1.01 * right(*args)


def break_the_reference() -> None:
    """Let the reference process run a module that does not exist."""
    from rl_megatron.certify import single_process

    single_process.__name__ = "rl_megatron.certify.nowhere"


def test_a_correct_layout_is_certified(tmp_path, forks):
    options = ("train.batching=packed", "train.fused_head=true", "optimizer.overlap=true")
    ended = forks.run_ranks(tmp_path, "certify", "experiment=quickstart", "parallel.tensor=2", *options, ranks=2)
    assert [rank.status for rank in ended] == [0, 0], ended
    done = ended[0]
    assert "fused head, overlapped, on cpu, compared with one process" in done.out
    assert "This layout gives what one process gives" in done.out and "DIFFERS" not in done.out
    for words in (
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
        assert words in done.out
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".txt"], "it left files behind"


def test_a_failure_of_the_reference_ends_every_rank(tmp_path, forks):
    done = forks.run_ranks(tmp_path, "certify", "parallel.tensor=2", ranks=2, before=break_the_reference)
    assert [rank.status for rank in done] == [1, 1]
    assert all("RuntimeError: the reference process failed" in rank.err for rank in done), done


def test_experts_are_certified_with_their_balancing_loss(tmp_path, forks):
    balance = ("model.router_aux_loss=0.1", "model.router_aux_loss_scope=global")
    overrides = ("model=nano_moe", *balance, "parallel.context=2", "parallel.expert=2")
    packed = ("train.batching=packed", "train.share_prefixes=auto")
    done = forks.run_ranks(tmp_path, "certify", *overrides, *packed, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done


def test_the_documented_layout_of_eight_ranks_is_certified(tmp_path, forks):
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
        (double_the_gradient_only, "gradient of sft"),
        (scale_attention, "loss of sft"),
    ],
    ids=["the loss", "the gradient only", "attention"],
)
def test_a_wrong_scaling_is_named(tmp_path, forks, breakage, first):
    done = forks.run_ranks(tmp_path, "certify", "parallel.context=2", ranks=2, before=breakage)
    verdict = f"does NOT give what one process gives: {first} differs by"
    assert verdict in " ".join(done[0].out.split()), done[0].err
    assert [rank.status for rank in done] == [1, 1] and "DIFFERS" in done[0].out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tensor=3"], "parallel.tensor=3"),
        (["parallel.expert=2"], "parallel.expert=2"),
        (["algorithm=dpo", "data=gsm8k_pairs", "data.path=x", "loss=draft_cross_entropy"], "set loss to dpo, ipo,"),
        (["algorithm=grpo", "loss.ratio_clip_min=abc"], "ratio_clip_min='abc'"),
        (["algorithm=grpo", "loss.name=clipped_gp"], "clipped_pg"),
    ],
    ids=["degrees", "experts", "a loss without pairs", "a wrong value", "a mistyped loss"],
)  # fmt: skip
def test_a_configuration_that_cannot_run_is_refused_in_one_line(tmp_path, forks, overrides, words):
    refused = forks.run(tmp_path, "certify", *overrides)
    assert refused.status == 2 and refused.err.startswith("error: ") and words in refused.err, refused.err
    assert refused.err.count("\n") == 1
