"""Every metric that rollouts, evaluations, engines and training steps report is declared."""

import pytest
import torch

from rl_megatron.algorithms import metrics
from rl_megatron.algorithms.registry import eval_metric_names
from rl_megatron.algorithms.rollout import reward_kl
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.metrics import EVAL_METRICS, METRICS
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import MSEValueLoss, build_loss
from rl_megatron.losses import metrics as losses
from rl_megatron.rollouts.statistics import describe_rollouts, learned_statistics, logprob_mismatch
from rl_megatron.rollouts.tools.toolbox import COUNTS
from rl_megatron.weight_sync.sender import SyncTimings
from tests.unit.algorithms.fakes import whole


def names(declared):
    return {metric.name for metric in declared}


# Of workers other than completion, and of tools.
OF_TURNS = {"turns", "segments", "failed_trajectories", "masked_groups", "retried_trajectories", *COUNTS}


def test_the_statistics_of_rollouts_are_declared():
    mask = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    rollouts = BatchedDataDict(
        rewards=torch.tensor([0.0, 1.0]), input_lengths=torch.tensor([2, 2]), prompt_lengths=torch.tensor([1, 1]),
        stopped=torch.tensor([True, False]), token_mask=mask, prev_logprobs=-mask, generation_logprobs=-mask,
        reference_policy_logprobs=-mask, advantages=mask, weight_version=torch.tensor([1, 1]),
        sample_mask=torch.ones(2),
    )  # fmt: skip
    rollouts = whole(rollouts)
    loss = build_loss("clipped_pg", {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1})
    reported = describe_rollouts([rollouts], 2) | logprob_mismatch(rollouts) | reward_kl(rollouts, loss)
    reported |= learned_statistics(rollouts, 1)
    elsewhere = {"sampling_rounds", "mismatch_routing", "teacher_kl", *OF_TURNS}
    assert reported.keys() | elsewhere == names(metrics.ROLLOUT) | set(logprob_mismatch(rollouts))
    assert logprob_mismatch(rollouts).keys() <= names(losses.MISMATCH) | {"mismatch_p99"}


def test_the_metrics_of_a_weight_sync_are_declared():
    of_policy = SyncTimings(bytes=8).metrics().keys()
    of_engines = {f"refit_{phase}_{unit}" for phase in ("verify", "copy") for unit in ("seconds", "gb_per_s")}
    assert of_policy | of_engines == names(metrics.WEIGHT_SYNC)


def test_the_critics_metrics_are_those_of_its_loss_and_optimizer():
    of_loss = MSEValueLoss().metric_reductions.keys()
    wanted = {f"critic_{name}" for name in of_loss | names(metrics.OPTIMIZER)}
    assert names(metrics.CRITIC) == wanted <= METRICS.keys()


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=grpo"],
        ["algorithm=sft"],
        ["algorithm=pretrain", "data=text", "data.path=x"],
        ["algorithm=dpo", "loss=dpo", "data=gsm8k_pairs", "data.path=x"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_the_metrics_of_an_evaluation_are_declared(overrides):
    given = eval_metric_names(load_config(overrides).first)
    assert given and set(given) <= EVAL_METRICS.keys()


def test_only_eval_metrics_may_reuse_a_name():
    shared = EVAL_METRICS.keys() & METRICS.keys()
    assert shared == {"accuracy", "reward"}
    assert EVAL_METRICS["accuracy"].meaning != METRICS["accuracy"].meaning
