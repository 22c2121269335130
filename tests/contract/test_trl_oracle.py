"""Our policy gradients and divergences against TRL's own code.

They are equal in value and gradient wherever the definitions coincide. Where they do not, they differ by exactly what
the docstrings say.
"""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from rl_megatron.algorithms.advantages import group_decoupled
from rl_megatron.losses import build_loss
from rl_megatron.losses.functional import kl_penalty, truncated_weights
from tests.contract.loss_cases import VOCAB
from tests.contract.trl_trainers import EXACT, assert_equal, make_rollouts, mask_of, one_process

pytestmark = pytest.mark.change
NO_KL = {"reference_policy_kl_penalty": 0.0}
PER_SEQUENCE = {"token_level_loss": False}
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}


@pytest.fixture
def rollouts():
    return make_rollouts()


def rows(rollouts, start, end):
    batch, logprobs, entropy = rollouts
    return {key: value[start:end] for key, value in batch.items()}, logprobs[start:end], entropy[start:end]


def ours(rollouts, cfg, num_sequences=None, num_tokens=None):
    """(value, gradients with respect to logprobs and entropy, metrics) of clipped_pg."""
    batch, *streams = rollouts
    logprobs, entropy = (stream.clone().requires_grad_() for stream in streams)
    value, metrics = build_loss("clipped_pg", cfg).evaluate(
        batch,
        len(logprobs) if num_sequences is None else num_sequences,
        mask_of(batch).sum() if num_tokens is None else num_tokens,
        next_token_logprobs=logprobs,
        next_token_entropy=entropy,
    )
    return value.detach(), torch.autograd.grad(value, (logprobs, entropy), materialize_grads=True), metrics


def trl(rollouts, loss_type, *, num_items=None, microbatches=1, trainer=GRPOTrainer, **settings):
    """The same of TRL's GRPO loss; `settings` are keys of its GRPOConfig. A prompt is the first token alone."""
    batch, *streams = rollouts
    logprobs, entropy = (stream.clone().requires_grad_() for stream in streams)
    mask = mask_of(batch)
    on_policy = settings.pop("on_policy", False)
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": microbatches} | settings
    self = one_process(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        args=SimpleNamespace(**args),
        loss_type=loss_type,
        epsilon_low=settings.get("epsilon", 0.2),
        epsilon_high=settings.get("epsilon_high", settings.get("epsilon", 0.2)),
        beta=settings.get("beta", 0.0),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        entropy_coef=settings.get("entropy_coef", 0.0),
        max_completion_length=settings.get("max_completion_length"),
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm="importance_sampling_ratio" in settings,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=microbatches,
    )
    value = trainer._compute_loss(
        self,
        self.model,
        {
            "prompt_ids": batch["input_ids"][:, :1],
            "prompt_mask": torch.ones_like(batch["input_ids"][:, :1]),
            "completion_ids": batch["input_ids"][:, 1:],
            "completion_mask": mask,
            "advantages": batch["advantages"][:, 1] if trainer is GMPOTrainer else batch["advantages"][:, 1:],
            "old_per_token_logps": None if on_policy else batch["prev_logprobs"][:, 1:],
            "ref_per_token_logps": batch["reference_policy_logprobs"][:, 1:],
            "num_items_in_batch": mask.sum() if num_items is None else num_items,
            "importance_sampling_ratio": settings.get("importance_sampling_ratio"),
        },
    )
    metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
    return value.detach(), torch.autograd.grad(value, (logprobs, entropy), materialize_grads=True), metrics


@pytest.mark.parametrize(
    ("cfg", "loss_type", "settings"),
    [
        pytest.param({}, "dapo", {}, id="token mean: dapo"),
        pytest.param({}, "bnpo", {}, id="token mean: bnpo of one batch"),
        pytest.param(PER_SEQUENCE, "grpo", {}, id="sequence mean: grpo"),
        pytest.param({"ratio_clip_max": 0.28}, "dapo", {"epsilon_high": 0.28}, id="clip-higher"),
        pytest.param(
            GSPO | {"ratio_clip_min": 0.05, "ratio_clip_max": 0.08},
            "grpo",
            {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
            id="gspo",
        ),
        pytest.param({"ratio_clip_c": 1.25}, "dapo", {"delta": 1.25}, id="dual clip: delta"),
        pytest.param(
            {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.3},
            "cispo",
            {"epsilon_high": 1.3},
            id="cispo",
        ),
        pytest.param({"entropy_coeff": 0.1}, "dapo", {"entropy_coef": 0.1}, id="entropy bonus"),
    ],
)
def test_policy_gradients_coincide(rollouts, cfg, loss_type, settings):
    mine, theirs = ours(rollouts, NO_KL | cfg), trl(rollouts, loss_type, **settings)
    assert_equal(mine, theirs)
    assert (mine[0] == ours(rollouts, NO_KL)[0]) == (not cfg), "a setting that does not bite compares nothing"
    assert 0.1 < mine[2]["clip_fraction"] < 0.95, "nor does a clip that never or always bites"
    assert mine[2]["entropy"].item() == pytest.approx(theirs[2]["entropy"], rel=1e-12)


def test_soft_adaptive_policy_optimization_coincides(rollouts):
    cfg = {"use_sapo": True, "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5, "token_level_loss": False}
    mine = ours(rollouts, NO_KL | cfg)
    assert_equal(mine, trl(rollouts, "sapo", sapo_temperature_pos=1.5, sapo_temperature_neg=2.5))
    assert abs(mine[0] - ours(rollouts, NO_KL | PER_SEQUENCE)[0]) > 1e-3


def test_the_geometric_mean_of_ratios_coincides(rollouts):
    """TRL's advantages are one per sequence."""
    batch, *streams = rollouts
    batch = batch | {"advantages": batch["advantages"][:, :1].expand_as(batch["advantages"])}
    cfg = {"use_gmpo": True, "token_level_loss": False, "ratio_clip_min": 0.1, "ratio_clip_max": 0.3}
    mine = ours((batch, *streams), NO_KL | cfg)
    theirs = trl((batch, *streams), "grpo", trainer=GMPOTrainer, epsilon=0.1, epsilon_high=0.3)
    assert_equal(mine, theirs)
    wide = ours((batch, *streams), NO_KL | cfg | {"ratio_clip_min": 9.0, "ratio_clip_max": 9.0})
    assert abs(mine[0] - wide[0]) > 1e-3, "a clip that never bites compares nothing"


def test_a_policy_that_has_not_moved_coincides_without_old_logprobs(rollouts):
    cfg = NO_KL | {"force_on_policy_ratio": True}
    assert_equal(ours(rollouts, cfg), trl(rollouts, "dapo", on_policy=True))


def test_dr_grpo_takes_every_sequence_for_equally_long(rollouts):
    theirs = trl(rollouts, "dr_grpo", max_completion_length=11)
    assert_equal(ours(rollouts, NO_KL | {"fixed_sequence_length": 11}), theirs)


def parts(rollouts, whole):
    """(value, gradient) of `whole` called on microbatches of 2 and 4 rows and added up."""
    results = [whole(rows(rollouts, 0, 2)), whole(rows(rollouts, 2, 6))]
    return sum(result[0] for result in results), torch.cat([result[1][0] for result in results])


def test_microbatches_of_the_token_mean_add_up_in_dapo_and_not_in_bnpo(rollouts):
    num_tokens = mask_of(rollouts[0]).sum()
    ours_in_parts = parts(rollouts, lambda part: ours(part, NO_KL, num_tokens=num_tokens))
    dapo = parts(rollouts, lambda part: trl(part, "dapo", num_items=num_tokens, microbatches=2))
    for mine, theirs in zip(ours_in_parts, dapo, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)
    bnpo, _ = parts(rollouts, lambda part: trl(part, "bnpo", microbatches=2))
    assert abs(bnpo - ours_in_parts[0]) > 1e-3, "a mean of the microbatches' means, which are of unequal size"


def test_a_row_without_tokens_counts_in_trl_and_a_masked_sample_does_not_here(rollouts):
    batch, *streams = rollouts
    batch = batch | {"sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=torch.float64)}
    mine = ours((batch, *streams), NO_KL | PER_SEQUENCE, num_sequences=5)
    theirs = trl((batch, *streams), "grpo")
    torch.testing.assert_close(mine[0] * 5 / 6, theirs[0], **EXACT)


@pytest.mark.parametrize("aggregation", ["dapo", "grpo"])
def test_the_kl_is_equal_and_its_gradient_has_one_more_term(rollouts, aggregation):
    """TRL differentiates the estimate alone, ∇k3; ours adds k3·∇log π, the part of ∇KL through the sampling."""
    batch, logprobs, _ = rollouts
    cfg = {"reference_policy_kl_penalty": 0.3, "token_level_loss": aggregation == "dapo"}
    mine, theirs = ours(rollouts, cfg), trl(rollouts, aggregation, beta=0.3)
    torch.testing.assert_close(mine[0], theirs[0], **EXACT)
    mask = mask_of(batch)
    weights = mask / mask.sum() if aggregation == "dapo" else mask / mask.sum(1, keepdim=True) / len(mask)
    extra = 0.3 * weights * kl_penalty(logprobs, batch["reference_policy_logprobs"][:, 1:], "k3")
    assert extra.abs().max() > 1e-3
    torch.testing.assert_close(mine[1][0] - extra, theirs[1][0], rtol=1e-10, atol=1e-14)
    if aggregation == "dapo":
        assert mine[2]["kl_penalty"].item() == pytest.approx(theirs[2]["kl"], rel=1e-12)


def test_the_kl_gradient_coincides_with_bias_correction_on_policy(rollouts):
    cfg = {"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.3}
    theirs = trl(rollouts, "dapo", beta=0.3, use_bias_correction_kl=True, on_policy=True)
    assert_equal(ours(rollouts, cfg), theirs)


def test_the_kl_gradient_coincides_with_bias_correction_off_policy(rollouts):
    """TRL weighs the estimate by π/π_old, we by π/π_generation: one and the same where engine and trainer agree."""
    batch, *streams = rollouts
    batch = batch | {"generation_logprobs": batch["prev_logprobs"]}
    cfg = {"reference_policy_kl_penalty": 0.3, "use_on_policy_kl_approximation": True}
    theirs = trl((batch, *streams), "dapo", beta=0.3, use_bias_correction_kl=True)
    assert_equal(ours((batch, *streams), cfg), theirs)


def test_the_correction_for_the_engine_weighs_the_surrogate_and_not_the_kl(rollouts):
    batch = rollouts[0]
    ratio = (batch["prev_logprobs"] - batch["generation_logprobs"])[:, 1:].exp()
    weights, outside = truncated_weights(ratio, 0.0, 1.2)
    assert 0.05 < outside.double().mean() < 0.95
    cfg = {
        "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.2, "reference_policy_kl_penalty": 0.3,
    }  # fmt: skip
    value = ours(rollouts, cfg)[0]
    torch.testing.assert_close(value, trl(rollouts, "dapo", beta=0.3, importance_sampling_ratio=weights)[0], **EXACT)


def test_rloo_follows_the_sum_over_tokens(rollouts):
    """On-policy: TRL's ratio is of whole sequences and its gradient the same A·∇Σ log π."""
    batch, logprobs, entropy = rollouts
    mask = mask_of(batch)
    advantages = batch["advantages"][:, :1]
    batch = batch | {"advantages": advantages.expand_as(batch["token_mask"])}
    leaf = logprobs.clone().requires_grad_()
    self = one_process(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, entropy, None), epsilon_low=0.2, epsilon_high=0.2
    )
    ids = batch["input_ids"]
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids[:, 1:], "completion_mask": mask,
        "advantages": advantages[:, 0], "old_logps": (logprobs * mask).sum(1),
    }  # fmt: skip
    (theirs,) = torch.autograd.grad(RLOOTrainer._compute_loss(self, self.model, inputs), leaf)
    sums = NO_KL | {"disable_ppo_ratio": True, "fixed_sequence_length": 1}
    _, (mine, _), _ = ours((batch, logprobs, entropy), sums)
    torch.testing.assert_close(mine, theirs, **EXACT)


def trl_advantages(scores, weights, group_size):
    """Run the branch of GRPOTrainer for multi_objective_aggregation="normalize_then_sum"."""
    module = ast.parse(inspect.getsource(grpo_trainer))
    body = next(
        node.body
        for node in ast.walk(module)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("aggregation == 'normalize_then_sum'")
        and any(isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "advantages" for each in node.body)
    )  # fmt: skip
    names = vars(grpo_trainer) | {
        "self": SimpleNamespace(reward_weights=weights, reward_funcs=range(len(weights))), "device": "cpu",
        "rewards_per_func": scores, "num_generations": group_size, "unscorable_mask": scores.isnan().all(1),
    }  # fmt: skip
    exec(compile(ast.Module(body, []), "grpo_trainer", "exec"), names)
    return names["advantages"].nan_to_num(0.0)


def test_group_decoupled_advantages_coincide():
    """Scores and weights are large, so that TRL's ε of 1e-4 and ours of 1e-6 are both negligible."""
    generator = torch.Generator().manual_seed(0)
    scores = 1e4 * torch.randn(12, 3, generator=generator)
    scores[2, 0] = scores[5, 1] = torch.nan
    scores[7] = torch.nan
    scores[8:, 2] = 5e3  # equal in one group
    weights = 1e5 * torch.tensor([1.0, 0.3, 2.0])
    theirs = trl_advantages(scores, weights, 4)
    assert theirs[7] == 0 and theirs.std() > 0.5
    torch.testing.assert_close(group_decoupled(scores, weights, 4), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kl_type", "beta"), [("forward", 0.0), ("reverse", 1.0)])
@pytest.mark.parametrize("zero_outside_topk", [False, True])
def test_a_divergence_over_the_whole_vocabulary_coincides(rollouts, kl_type, beta, zero_outside_topk):
    """TRL's from hidden states and heads, in fp32; the identity as a head makes the hidden states logits."""
    batch, generator = rollouts[0], torch.Generator().manual_seed(2)
    shape = (*batch["input_ids"].shape, VOCAB)
    student, teacher = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    temperature, mask, head = 0.7, mask_of(batch), torch.eye(VOCAB, dtype=torch.float64)
    logits, indices = teacher.topk(VOCAB, dim=-1)
    data = batch | {"teacher_topk_logits": logits, "teacher_topk_indices": indices, "temperature": temperature}
    loss_fn = build_loss("distillation", {"kl_type": kl_type, "zero_outside_topk": zero_outside_topk})
    mine, _ = loss_fn(student, data, len(mask), mask.sum())
    theirs, *_ = _chunked_divergence_loss(
        student[:, :-1], teacher[:, :-1], head, head, mask, beta=beta, temperature=temperature
    )
    in_fp32 = {"rtol": 1e-5, "atol": 1e-7, "check_dtype": False}
    torch.testing.assert_close(theirs, mine, **in_fp32)
    torch.testing.assert_close(*(torch.autograd.grad(value, student)[0] for value in (theirs, mine)), **in_fp32)


@pytest.mark.parametrize(
    ("settings", "beta"),
    [({"kl_type": "forward"}, 0), ({"kl_type": "reverse"}, 1)]
    + [({"kl_type": "jensen_shannon", "jsd_beta": beta}, beta) for beta in (0.1, 0.5, 0.8)],
    ids=str,
)
@pytest.mark.parametrize("name", ["full_distillation", "distillation"])
def test_every_divergence_of_gkd_coincides(rollouts, name, settings, beta):
    """GKD's generalised Jensen-Shannon divergence; the top-k loss is given the whole vocabulary as its top-k."""
    batch, generator = rollouts[0], torch.Generator().manual_seed(2)
    student, teacher = (
        2 * torch.randn(*batch["input_ids"].shape, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    student.requires_grad_()
    mask = mask_of(batch)
    logits, indices = teacher.topk(VOCAB, dim=-1)
    given = {"teacher_logits": teacher, "teacher_topk_logits": logits, "teacher_topk_indices": indices}
    mine, _ = build_loss(name, settings)(student, batch | given | {"temperature": 0.7}, len(mask), mask.sum())
    labels = torch.where(mask != 0, batch["input_ids"][:, 1:], -100)
    theirs = GKDTrainer.generalized_jsd_loss(
        student[:, :-1], teacher[:, :-1], labels, beta, temperature=0.7, num_items_in_batch=mask.sum()
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(value, student)[0] for value in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    assert gradients[0].abs().max() > 1e-3
