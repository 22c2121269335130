"""PPO's training loop with fakes: which model learns when, and which checkpoints of the critic are kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.algorithms import ppo as training_loop
from rl_megatron.algorithms.ppo import CRITIC
from rl_megatron.batching.batch import Batch
from rl_megatron.checkpoint.resumed_state import ResumedState
from rl_megatron.checkpoint.retention import delete_older
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import ClippedPGLossFn, MSEValueLoss
from rl_megatron.rollouts.statistics import describe_rollouts
from rl_megatron.runs import checkpointer
from rl_megatron.runs import stage as stage_module
from rl_megatron.runs.evaluations import Evaluations
from rl_megatron.runs.stage import Stage
from rl_megatron.timing import PhaseTimer
from tests.unit.algorithms.fakes import ONE_RANK, Scripted

OVERRIDES = (
    "algorithm=ppo", "algorithm.samples_per_prompt=2", "loss.reference_policy_kl_penalty=0",
    "train.global_batch_size=64",
)  # fmt: skip


class Model:
    """A policy that records its training batches and the names of its saves."""

    scheduler, weight_version, topology = SimpleNamespace(num_steps=0), 1, ONE_RANK

    def __init__(self, name, log):
        self.name, self.log = name, log

    def as_batch(self, data):
        return data

    def distribute(self, batch, groups=None):
        return batch

    def train(self, batch, loss_fn, **_):
        self.log.append((self.name, loss_fn, batch))
        return {"loss": 1.0, "grad_norm": 2.0}

    def get_logprobs(self, batch):
        return {"logprobs": -batch["token_mask"]}

    def freeze_reference(self):
        pass

    def get_reference_policy_logprobs(self, batch):
        return {"reference_logprobs": -1.5 * batch["token_mask"]}

    def get_values(self, batch):
        return {"values": 0.5 * batch["token_mask"]}

    def begin_checkpoint(self, directory, step, **kept):
        self.log.append(("begin", self.name, Path(directory).name, step))
        return Written(lambda: self.log.append(("save", self.name, Path(directory).name, step)))

    def load_checkpoint(self, path, verify):
        self.log.append(("load", self.name, str(path)))
        return {"step": 1, "results": {}, "stage_state": {}}


@dataclass
class Written:
    finish: Callable[[], None]

    def is_written(self):
        return True


class Rollouts:
    """Two completions a prompt, the second one right."""

    def __init__(self, stage, algorithm):
        pass

    def collect(self, step):
        mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
        batch = BatchedDataDict(
            input_ids=torch.ones(2, 3, dtype=torch.long), token_mask=mask, sample_mask=torch.ones(2),
            rewards=torch.tensor([0.0, 1.0]), generation_logprobs=-mask, prompt_lengths=torch.tensor([1, 1]),
            input_lengths=torch.tensor([3, 2]), stopped=torch.tensor([True, True]), weight_version=torch.tensor([1, 1]),
        )  # fmt: skip
        rollouts = Batch.from_whole(batch)
        return rollouts, describe_rollouts([rollouts], 2)

    def keep(self, step, learned):
        pass


@pytest.fixture
def run(monkeypatch):
    """`run(*overrides, steps=…)`: (log of what was trained and saved, records by step)."""

    def go(*overrides, saved=(), **train):
        log, records = [], {}
        config = load_config([*OVERRIDES, *overrides]).first
        config = replace(config, train=replace(config.train, **train))
        metrics_logger = SimpleNamespace(
            begin_stage=lambda *_: None,
            has_steps=lambda stage: False,
            show_phase=lambda phase: None,
            end_stage=lambda: None,
            record_samples=lambda step, samples: None,
            finish_writing=lambda: None,
            record=lambda step, report, kind="train": records.setdefault(kind, {}).setdefault(step, report),
        )
        monkeypatch.setattr(stage_module, "find_checkpoints", lambda directory: list(saved))
        monkeypatch.setattr(ResumedState, "load", lambda *_: None)  # the checkpoint of the policy here keeps nothing
        monkeypatch.setattr(
            checkpointer,
            "delete_older",
            lambda where, keep, companions, best: log.append(("delete", where.name, keep, companions.name)),
        )
        tokenizer = SimpleNamespace(digest="t")
        where = Path("checkpoints/ppo")
        policy, heldout = Model("policy", log), SimpleNamespace(evaluate=lambda policy, engine: ({}, []))
        evaluations = Evaluations("ppo", config.train, policy, Scripted({}), heldout, metrics_logger, PhaseTimer())
        stage = Stage(
            "ppo", config, policy, tokenizer, metrics_logger, where, evaluations, "init_from=null", Model("critic", log)
        )
        training_loop.ppo(stage, stage.policy, Rollouts(stage, config.algorithm), config.algorithm, stage.critic)
        return log, records["train"]

    return go


def trained(log):
    return [entry[0] for entry in log if entry[0] in ("policy", "critic")]


def test_only_the_critic_learns_during_its_warmup(run):
    log, records = run("algorithm.critic_warmup_steps=2", steps=3)
    assert trained(log) == ["critic", "critic", "critic", "policy"]
    assert "loss" not in records[2] and {"loss", "critic_loss", "critic_grad_norm", "reward"} <= records[3].keys()


def test_logprobs_are_recomputed_only_if_something_needs_them(run):
    """The mismatch with the engine is recorded in every step, here by the fake policy's own report or not at all."""

    def recomputed(*overrides, **train):
        log, records = run(*overrides, **train)
        batches = [entry[2] for entry in log if entry[0] == "critic"]
        assert ["prev_logprobs" in batch for batch in batches] == ["mismatch_mean" in r for r in records.values()]
        return ["prev_logprobs" in batch for batch in batches]

    assert recomputed(steps=1) == [False]
    assert recomputed("algorithm.recompute_logprobs=always", steps=1) == [True]
    assert recomputed("algorithm.recompute_logprobs=never", steps=1) == [False]
    assert recomputed("algorithm.critic_warmup_steps=1", steps=2) == [True, False]
    in_reward = ("loss.use_kl_in_reward=true", "loss.reference_policy_kl_penalty=0.1")
    assert recomputed(*in_reward, steps=1) == [True]


def test_every_pass_over_a_rollout_trains_both(run):
    assert trained(run("algorithm.updates_per_rollout=2", steps=1)[0]) == ["critic", "policy"] * 2


def test_losses_and_batches(run):
    log, _ = run("algorithm.value_clip=0.3", "loss.ratio_clip_max=0.4", "algorithm.whiten_advantages=false", steps=1)
    (_, value_loss, batch), (_, policy_loss, same) = log[:2]
    assert isinstance(value_loss, MSEValueLoss) and value_loss.cfg.cliprange == 0.3
    assert isinstance(policy_loss, ClippedPGLossFn) and policy_loss.cfg.ratio_clip_max == 0.4
    assert same is batch and value_loss.required_keys[-1] in batch
    assert set(policy_loss.required_keys) <= set(batch.keys())
    assert batch["returns"].shape == batch["advantages"].shape == (2, 3)


def test_the_kl_in_the_reward_is_recorded(run):
    in_reward = ["loss.use_kl_in_reward=true", "loss.reference_policy_kl_type=k1"]
    _, records = run("loss.reference_policy_kl_penalty=0.1", *in_reward, "algorithm.critic_warmup_steps=1", steps=2)
    assert [records[step]["reward_kl"] for step in (1, 2)] == [0.5, 0.5]
    assert "reward_kl" not in run(steps=1)[1][1]


def test_discount_and_lambda_reach_the_advantages(run):
    settings = ["algorithm.discount=0.5", "algorithm.gae_lambda=0", "algorithm.whiten_advantages=false"]
    batch = run(*settings, steps=1)[0][0][2]
    assert batch["advantages"].tolist() == [[0.0, 0.5 * 0.5 - 0.5, -0.5], [0.0, 0.5, 0.0]]
    whitened = run(steps=1)[0][0][2]["advantages"]
    assert whitened[0, 1:].sum() + whitened[1, 1] == pytest.approx(0.0, abs=1e-6)


def test_the_critic_is_saved_before_the_policy_and_kept_as_long(run):
    log, _ = run(steps=2, save_every=1, keep_checkpoints=3)
    happened = [entry for entry in log if entry[0] in ("save", "delete")]
    for step, three in ((1, happened[:3]), (2, happened[3:])):
        assert three == [
            ("save", "critic", "ppo.critic", step),
            ("save", "policy", "ppo", step),
            ("delete", "ppo", 3, "ppo.critic"),
        ]


def retention(directory):
    policy, critic = Path(directory) / "ppo", Path(directory) / "ppo.critic"
    for where, steps in ((policy, (2, 3, 4)), (critic, (1, 2, 3, 4, 6))):
        for step in steps:
            (where / f"step-{step:06d}").mkdir(parents=True)
            (where / f"step-{step:06d}" / MANIFEST).write_text("{}")
    (critic / "step-000005.incomplete").mkdir()
    delete_older(policy, 2, critic)
    return [sorted(path.name for path in where.iterdir()) for where in (policy, critic)]


def test_the_critics_checkpoints_are_kept_with_the_policys(ranks, tmp_path):
    """The critic's step 6 is of a run that was killed before it saved its policy, and resumed from step 3."""
    (kept,) = ranks.run(1, retention, str(tmp_path))
    assert kept == [["step-000003", "step-000004"]] * 2


def test_a_resumed_stage_loads_the_critic_of_the_same_step(run):
    log, _ = run(steps=2, saved=[Path("checkpoints/ppo/step-000001")])
    assert log[:2] == [
        ("load", "policy", "checkpoints/ppo/step-000001"), ("load", "critic", "checkpoints/ppo.critic/step-000001"),
    ]  # fmt: skip
    assert trained(log) == ["critic", "policy"]


def test_the_schedule_counts_the_optimizer_steps_of_a_rollout():
    overrides = [*OVERRIDES, "algorithm.updates_per_rollout=3", "train.steps=5", "train.global_batch_size=48"]
    config = load_config(overrides).first
    assert config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt == 64
    algorithm, train = config.algorithm, config.train
    assert algorithm.optimizer_steps(train) == CRITIC.optimizer_steps(algorithm, train) == 5 * 3 * 2


def test_the_policys_schedule_does_not_count_the_critics_warmup():
    """Otherwise the decay would never reach its end."""
    overrides = [*OVERRIDES, "algorithm.critic_warmup_steps=2", "train.steps=5", "train.global_batch_size=32"]
    config = load_config(overrides).first
    assert config.algorithm.optimizer_steps(config.train) == (5 - 2) * 2
    assert CRITIC.optimizer_steps(config.algorithm, config.train) == 5 * 2
