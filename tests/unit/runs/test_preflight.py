"""Errors before the first step: losses that do not suit an algorithm, damaged checkpoints, batches that do not fit."""

import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.algorithms.rollout import needs_reference
from rl_megatron.checkpoint.directory import publish
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.generation.engines import check_engine
from rl_megatron.generation.transformers.devices import choose_engine_devices
from rl_megatron.losses import LOSSES, ClippedPGLossFn, LossFunction, LossInputType, LossType
from rl_megatron.observability.sinks import check_sinks
from rl_megatron.runs.preflight import (
    check_budget,
    check_keep_best,
    check_loss,
    check_saved,
)

PAIRS = ["data=gsm8k_pairs", "data.path=x"]
OVERRIDES = {
    "grpo": ["algorithm=grpo"],
    "reinforce++": ["algorithm=grpo", "algorithm.advantage_estimator=reinforce_plus_plus"],
    "ppo": ["algorithm=ppo"],
    "dpo": ["algorithm=dpo", *PAIRS],
    "reward_model": ["algorithm=reward_model", *PAIRS],
}
IN_REWARD = {"name": "clipped_pg", "use_kl_in_reward": True}


def stage_of(algorithm, loss):
    return replace(load_config(OVERRIDES[algorithm]).first, loss=loss)


@pytest.mark.parametrize(
    ("algorithm", "loss", "words"),
    [
        ("grpo", {"name": "nll"}, "not use advantages.*set loss to clipped_pg"),
        ("ppo", {"name": "dpo"}, "not use advantages.*set loss to clipped_pg"),
        ("grpo", {"name": "clipped_pgg"}, "clipped_pg"),
        ("grpo", {"name": "clipped_pg", "ratio_clip_mx": 0.2}, "did you mean 'ratio_clip_max'"),
        ("dpo", {"name": "clipped_pg"}, "not use logprobs of pairs.*set loss to dpo, ipo, simpo, cpo or orpo"),
        ("dpo", {"name": "preference"}, "not use logprobs of pairs"),
        ("reward_model", {"name": "dpo"}, "not use scores of pairs.*set loss to preference"),
        ("reward_model", {"name": "mse_value"}, "not use scores of pairs.*set loss to preference"),
    ],
)
def test_a_loss_that_does_not_suit_the_algorithm_is_refused(algorithm, loss, words):
    with pytest.raises(ConfigError, match=words):
        check_loss(stage_of(algorithm, loss))


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("grpo", {"name": "clipped_pg"}),
        ("grpo", {"name": "clipped_pg", "positive_example_nll_weight": 0.1}),
        ("reinforce++", IN_REWARD),
        ("ppo", IN_REWARD),
        ("dpo", {"name": "dpo", "sft_loss_weight": 0.1}),
        ("dpo", {"name": "ipo"}),
        ("dpo", {"name": "simpo"}),
        ("dpo", {"name": "cpo", "sft_loss_weight": 0.0}),
        ("dpo", {"name": "orpo"}),
        ("reward_model", {"name": "preference"}),
    ],
)
def test_losses_that_suit_the_algorithm_are_accepted(algorithm, loss):
    check_loss(stage_of(algorithm, loss))


def test_a_loss_that_needs_keys_that_rollouts_do_not_have_is_refused(monkeypatch):
    class Judged(ClippedPGLossFn):
        required_keys = ("advantages", "verdicts")

    monkeypatch.setitem(LOSSES, "judged", Judged)
    with pytest.raises(ConfigError, match=r"loss.name=judged needs \['verdicts'\], which ppo's batches do not have"):
        check_loss(stage_of("ppo", {"name": "judged"}))


class Protocol:
    """A loss that implements only `LossFunction`."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB

    def __init__(self, cfg):
        pass

    def __call__(self, data, global_valid_seqs, global_valid_toks, **inputs):
        raise AssertionError("preflight does not call a loss")


class OfPairs(Protocol):
    group_size = 2


class Judging(Protocol):
    required_keys = ("advantages", "verdicts")


@pytest.mark.parametrize(
    ("algorithm", "loss", "words"),
    [
        ("grpo", Protocol, None),
        ("ppo", Protocol, None),
        ("dpo", OfPairs, None),
        ("dpo", Protocol, "loss.name=own does not use logprobs of pairs"),  # its pairs might be separated
        ("reward_model", OfPairs, "loss.name=own does not use scores of pairs"),
        ("grpo", Judging, r"loss.name=own needs \['verdicts'\]"),
    ],
)
def test_losses_that_implement_only_the_protocol(monkeypatch, algorithm, loss, words):
    monkeypatch.setitem(LOSSES, "own", loss)
    assert isinstance(loss(None), LossFunction) and not needs_reference(loss(None))
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        check_loss(stage_of(algorithm, {"name": "own"}))


@pytest.mark.parametrize("algorithm", ["grpo", "dpo", "reward_model"])
def test_a_loss_without_a_name(algorithm):
    with pytest.raises(ConfigError, match=f"loss.name is not set, and {algorithm} needs a loss; set it to "):
        check_loss(stage_of(algorithm, {}))


def save(directory, step, model, **manifest):
    """A checkpoint with one file."""
    path, partial = directory / f"step-{step:06d}", directory / "partial"
    partial.mkdir(parents=True)
    (partial / "weights").write_text("1234")
    publish(partial, path, {"step": step, "model": asdict(model), **manifest})
    return path


TOKENIZER = SimpleNamespace(digest="t")


def test_a_critic_is_checked_with_its_policy(tmp_path):
    stage = load_config(["algorithm=ppo", "train.steps=5"]).first
    newest = save(tmp_path / "ppo", 3, stage.model)
    with pytest.raises(ConfigError, match=r"ppo\.critic/step-000003 does not exist"):
        check_saved(newest, stage, TOKENIZER)
    beside = save(tmp_path / "ppo.critic", 3, stage.model)
    check_saved(newest, stage, TOKENIZER)
    (beside / "weights").write_text("123")
    with pytest.raises(ConfigError, match=r"ppo\.critic/step-000003 is damaged: weights has 3 bytes instead of 4"):
        check_saved(newest, stage, TOKENIZER)
    check_saved(newest, replace(stage, train=replace(stage.train, steps=3)), TOKENIZER)  # no step left to take


@pytest.mark.parametrize(
    ("batching", "overrides", "items", "said"),
    [
        ("packed", [], [(3,), (40,)], "the largest sequence: 40 tokens; raise it to at least 40"),
        ("dynamic", [], [(3,), (40,)], "the largest sequence: 40 tokens; raise it to at least 40"),
        (
            "packed",
            ["parallel.context=2"],
            [(37,)],
            "37 tokens, padded to multiples of 4 for the layout; raise it to at least 40",
        ),
        ("packed", [], [(9, 9), (30, 10)], "the largest pair of sequences: 30 + 10 tokens; raise it to at least 40"),
        ("dynamic", [], [(19, 20), (9, 8)], "the largest pair of sequences: 19 + 20 tokens; raise it to at least 40"),
    ],
)
def test_the_largest_item_must_fit_a_microbatch_of_tokens(batching, overrides, items, said):
    stage = load_config([*overrides, f"train.batching={batching}", "train.micro_batch_tokens=39"]).first
    with pytest.raises(ConfigError) as refused:
        check_budget(stage, items)
    assert "train.micro_batch_tokens=39 does not hold" in str(refused.value) and said in str(refused.value)
    check_budget(replace(stage, train=replace(stage.train, micro_batch_tokens=40)), items)
    check_budget(replace(stage, train=replace(stage.train, batching="padded")), items)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.keep_best=accuracy"], None),
        (["train.keep_best=accuracy", "train.save_every=4", "train.eval_every=2"], None),
        (
            ["train.keep_best=nll_per_token"],
            "is not an eval metric of grpo on data.source=prompts; .* accuracy, or",
        ),
        (
            ["train.keep_best=accuracy", "train.save_every=4"],
            "train.save_every=4 is not a multiple of train.eval_every=0",
        ),
        (
            ["train.keep_best=accuracy", "train.save_every=4", "train.eval_every=3"],
            "not a multiple of train.eval_every=3",
        ),
    ],
)
def test_keep_best_needs_an_evaluation_of_every_checkpoint(overrides, words):
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        check_keep_best(load_config(["algorithm=grpo", *overrides]).first)


@pytest.mark.parametrize(
    ("overrides", "gpus", "words"),
    [
        (["engine_device=cuda"], 0, "generation.engine_device=cuda .*would compute on cuda:0, .* has 0 GPUs; set"),
        (["engine_device=cuda:1", "num_engines=2"], 2, "num_engines=2: .* on cuda:2, but this machine has 2 GPUs; set"),
        (["engine_device=cuda:1", "num_engines=2"], 3, None),
        (["engine_device=auto"], 0, None),
    ],
)
def test_engine_devices_are_checked_before_the_first_step(monkeypatch, overrides, gpus, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    given = ["generation.engine=transformers", *(f"generation.{override}" for override in overrides)]
    stage = load_config(["algorithm=grpo", "device=cpu", *given]).first
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        check_engine(stage, 50)


def test_an_engine_on_the_cpu_needs_shared_memory_if_the_policy_is_on_gpus():
    settings = load_config(
        ["algorithm=grpo", "generation.engine=transformers", "generation.engine_device=cpu"]
    ).first.generation
    with pytest.raises(ConfigError, match="engine_device=cpu and generation.refit=collective.*set generation.refit="):
        choose_engine_devices(settings, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("device", "refit", "refused"),
    [("cuda", "collective", True), ("cuda:1", "collective", True), ("cuda:2", "collective", False)]
    + [("auto", "collective", False), ("cuda", "shared_memory", False)],
)
def test_an_engine_on_a_ranks_gpu_is_refused_if_weights_are_sent_by_nccl(monkeypatch, device, refit, refused):
    """NCCL refuses two processes on one GPU, but only when the first weights are sent."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    given = [f"generation.engine_device={device}", f"generation.refit={refit}"]
    settings = load_config(["algorithm=grpo", "generation.engine=transformers", *given]).first.generation
    words = "generation.engine_device=cuda.*generation.refit=collective.*set engine_device=cuda:2 or higher, or refit="
    with pytest.raises(ConfigError, match=words) if refused else nullcontext():
        choose_engine_devices(settings, torch.device("cuda", 0))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_expandable_segments_that_engines_cannot_open_are_refused(monkeypatch, tmp_path, engine, variable):
    python = tmp_path / "python"  # it makes another system call, as in a container that forbids pidfd_getfd
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -c "$3" 100000 "$5" "$6"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = ["generation.refit=shared_memory", f"generation.engine={engine}", "device=cuda"]
    settings += ["generation.vllm.python=sh"] if engine == "vllm" else []
    stage = load_config(["algorithm=grpo", *settings]).first
    check_engine(stage, 50)
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:False")
    check_engine(stage, 50)
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    words = rf"generation.refit=shared_memory: {variable} has expandable_segments:True.*Function not implemented.*leave"
    with pytest.raises(ConfigError, match=words):
        check_engine(stage, 50)


def test_an_unknown_eval_metric_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="train.keep_best='acuracy'.*'accuracy', 'reward', 'nll_per_token'"):
        load_config(["train.keep_best=acuracy"])


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        ("[jsonl,tensorbord]", "no metric sink 'tensorbord'; did you mean 'tensorboard'"),
        ("[jsonl,wandb]", "no metric sink 'wandb'; to send metrics there, set logger.wandb=true$"),
        ("[tensorboard]", "add jsonl"),
    ],
)
def test_metric_sinks_that_cannot_be_used(sinks, words):
    with pytest.raises(ConfigError, match=words):
        check_sinks(load_config([f"metric_sinks={sinks}"]).metric_sinks)
