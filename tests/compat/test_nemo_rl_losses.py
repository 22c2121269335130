"""NeMo RL's losses, in both generations: what behaves as there, and every difference that compat/nemo_rl lists.

The first generation calls a loss with logits in the first place, the second prepares the logits and calls by name.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import asdict, is_dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rl_megatron.compat.nemo_rl import MODULES
from rl_megatron.compat.nemo_rl.errors import RuleError
from rl_megatron.losses import LossInputType, LossType, as_loss
from rl_megatron.losses import functional as F
from tests.contract.loss_cases import VOCAB, distillation_batch, pair_batch, policy_batch, token_batch, token_logits

FIRST = MODULES["nemo_rl.algorithms.loss_functions"]
SECOND = MODULES["nemo_rl.algorithms.loss"]
COUNTS = (torch.tensor(5.0), torch.tensor(15.0))
NO_KL = {"reference_policy_kl_penalty": 0.0}
CORRECTED = NO_KL | {"use_importance_sampling_correction": True}


@pytest.fixture(params=[FIRST, SECOND], ids=["first generation", "second generation"])
def nemo(request):
    """One generation: its names, and `call(loss, logits, data)` as its users call a loss."""

    def call(loss_fn, logits, data, counts=COUNTS, **options):
        if request.param is FIRST:
            return loss_fn(logits, data, *counts, **options)
        inputs, data = SECOND["prepare_loss_input"](logits, data, loss_fn)
        return loss_fn(data=data, global_valid_seqs=counts[0], global_valid_toks=counts[1], **inputs, **options)

    return SimpleNamespace(**request.param, call=call)


def batch_of(make):
    generator = torch.Generator().manual_seed(0)
    return make(generator), generator


def policy_case():
    batch, generator = batch_of(policy_batch)
    return token_logits(generator, batch, VOCAB), batch


def pair_case():
    batch, generator = batch_of(pair_batch)
    return token_logits(generator, batch, VOCAB), batch


def logprobs_of(logits, batch):
    return logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]


# ---- settings as attributes


SETTINGS = {
    "ClippedPGLossFn": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3, "ratio_clip_c": 3.0, "disable_ppo_ratio": True,
                        "use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.2},
    "DPOLossFn": {"reference_policy_kl_penalty": 0.2, "sft_loss_weight": 0.5, "preference_average_log_probs": True},
    "DistillationLossFn": {"kl_type": "reverse", "mixed_kl_weight": 0.3, "zero_outside_topk": True},
    "MseValueLossFn": {"scale": 0.5, "cliprange": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loss_carries_its_settings_as_attributes(nemo, name):
    if not hasattr(nemo, name):
        pytest.skip("not of this generation")
    loss_fn = getattr(nemo, name)(SETTINGS[name])
    assert is_dataclass(loss_fn.cfg) and asdict(loss_fn.cfg).items() >= SETTINGS[name].items()
    for key, value in asdict(loss_fn.cfg).items():
        assert getattr(loss_fn, key) == value, key
    again = pickle.loads(pickle.dumps(loss_fn))
    assert again.cfg == loss_fn.cfg and as_loss(loss_fn) is loss_fn


def test_the_kl_penalty_of_a_loss_is_0_if_the_reward_carries_the_kl(nemo):
    loss_fn = nemo.ClippedPGLossFn({"reference_policy_kl_penalty": 0.2, "use_kl_in_reward": True})
    assert loss_fn.reference_policy_kl_penalty == 0.0 and loss_fn.cfg.reference_policy_kl_penalty == 0.2


def test_assigning_a_setting_takes_effect_and_is_checked(nemo):
    logits, data = policy_case()
    loss_fn = nemo.ClippedPGLossFn(NO_KL)
    loss_fn.ratio_clip_min = loss_fn.ratio_clip_max = 0.01
    want = nemo.ClippedPGLossFn(NO_KL | {"ratio_clip_min": 0.01, "ratio_clip_max": 0.01})
    assert nemo.call(loss_fn, logits, data) == nemo.call(want, logits, data)
    loss_fn.token_level_loss = False
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL
    with pytest.raises(AssertionError, match="ratio_clip_min=-1 must not be negative"):
        loss_fn.ratio_clip_min = -1


# ---- truncation


@pytest.mark.parametrize(("kind", "weight"), [("tis", 0.5), ("icepop", 0.0)])
def test_a_weight_that_is_infinite_is_truncated_as_0(nemo, kind, weight):
    logits, data = policy_case()
    data["generation_logprobs"] = data["prev_logprobs"].clone()
    truncation = {"type": kind, "ratio": 2.0, "ratio_min": 0.5}
    cfg = CORRECTED | {f"truncated_importance_sampling_{key}": value for key, value in truncation.items()}
    _, before = nemo.call(nemo.ClippedPGLossFn(cfg), logits, data)
    row, column = (data["token_mask"][:, 1:] * data["sample_mask"][:, None] == 1).nonzero()[0].tolist()
    data["generation_logprobs"][row, column + 1] = -math.inf
    _, after = nemo.call(nemo.ClippedPGLossFn(cfg), logits, data)
    change = (before["sampling_importance_ratio"] - after["sampling_importance_ratio"]) * COUNTS[1]
    assert float(change) == pytest.approx(1 - weight, abs=1e-4)


def test_a_truncation_ratio_without_a_type_is_the_plain_upper_clamp(nemo):
    logits, data = policy_case()
    settings = CORRECTED | {"truncated_importance_sampling_ratio": 1.1}
    for cfg in (settings, nemo.ClippedPGLossConfig(**settings)):
        loss_fn = nemo.ClippedPGLossFn(cfg)
        loss, metrics = nemo.call(loss_fn, logits, data)
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        prev, generation, advantages = (
            data[key][:, 1:] for key in ("prev_logprobs", "generation_logprobs", "advantages")
        )
        ratio = (logprobs_of(logits, data) - prev).exp()
        surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        weights = (prev - generation).exp()
        assert (weights > 1.1).any() and (weights < 0.9).any()
        want = (weights.clamp(max=1.1) * surrogate * mask).sum() / COUNTS[1]
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        assert metrics["sampling_importance_ratio"] == pytest.approx(
            ((weights.clamp(max=1.1) * mask).sum() / COUNTS[1]).item(), rel=1e-6
        )
        assert loss_fn.truncated_importance_sampling_type is None
        assert loss_fn.truncated_importance_sampling_ratio == 1.1


# ---- rules


BROKEN = [
    ({"sequence_level_importance_ratios": True}, "mutually exclusive with token-level loss"),
    ({"truncated_importance_sampling_ratio": 2.0}, "only supported when use_importance_sampling_correction is True"),
    (CORRECTED | {"truncated_importance_sampling_ratio": 0.0}, "sampling_ratio should be positive, got 0.0"),
    (CORRECTED | {"truncated_importance_sampling_type": "tis"}, "sampling_ratio should be positive, got None"),
    (CORRECTED | {"truncated_importance_sampling_type": "clip", "truncated_importance_sampling_ratio": 2.0},
     "must be 'tis', 'icepop', or 'seq-mask-tis', got clip"),
    (CORRECTED | {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
     "truncated_importance_sampling_ratio_min should be set"),
    (CORRECTED | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.0,
                  "truncated_importance_sampling_ratio_min": 2.0}, "ratio_min=2.0 must be <= "),
    (CORRECTED | {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 1.0},
     "ratio_min=1.0 needs a truncated_importance_sampling_type"),
    (CORRECTED | {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 2.0,
                  "truncated_importance_sampling_ratio_min": 0.5, "sequence_level_importance_ratios": True,
                  "token_level_loss": False}, "seq-mask-tis is incompatible"),
    ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo is incompatible with disable_ppo_ratio"),
    ({"use_cispo": True, "force_on_policy_ratio": True}, "use_cispo is incompatible with force_on_policy_ratio"),
    ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo is incompatible with dual clipping"),
    ({"use_cispo": True, "token_level_loss": False}, "use_cispo requires token_level_loss=True"),
    ({"ratio_clip_c": 1.0}, "ratio_clip_c must exceed 1"),
    ({"ratio_clip_min": -0.1}, "ratio_clip_min=-0.1 must not be negative"),  # a rule of the core's
]  # fmt: skip


@pytest.mark.parametrize(("cfg", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_what_nemo_rl_asserts_is_a_value_error_and_an_assertion_error(nemo, cfg, words):
    for make in (nemo.ClippedPGLossFn, lambda settings: nemo.ClippedPGLossConfig(**settings)):
        with pytest.raises(RuleError, match=words) as error:
            make(cfg)
        assert isinstance(error.value, ValueError) and isinstance(error.value, AssertionError)


@pytest.mark.parametrize(
    ("name", "cfg", "words"),
    [
        ("DistillationLossFn", {"kl_type": "jensen"}, "Invalid KL type"),
        ("DistillationLossFn", {"mixed_kl_weight": 1.5}, "Invalid mixed KL weight"),
        ("DPOLossFn", {"sft_loss_weight": -1.0}, "sft_loss_weight=-1.0 must not be negative"),
        ("MseValueLossFn", {"cliprange": 0.0}, "cliprange=0.0 must be positive"),
    ],
)
def test_other_losses_break_rules_alike(nemo, name, cfg, words):
    if not hasattr(nemo, name):
        pytest.skip("not of this generation")
    with pytest.raises(AssertionError, match=words):
        getattr(nemo, name)(cfg)


def test_a_teacher_without_tokens_is_refused(nemo):
    data, generator = batch_of(distillation_batch)
    logits = token_logits(generator, data, VOCAB)
    for key in ("teacher_topk_indices", "teacher_topk_logits"):
        data[key] = data[key][..., :0]
    with pytest.raises(RuleError, match="topk must be positive, got 0"):
        nemo.call(nemo.DistillationLossFn({}), logits, data)


def test_an_sft_loss_needs_the_number_of_tokens(nemo):
    logits, data = pair_case()
    with pytest.raises(AssertionError, match="global_valid_toks must be provided for SFT loss"):
        nemo.call(nemo.DPOLossFn({"sft_loss_weight": 0.1}), logits, data, (COUNTS[0], None))
    nemo.call(nemo.DPOLossFn({}), logits, data, (COUNTS[0], None))


@pytest.fixture
def own_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_needs_a_rank(own_group):
    logits, data = policy_case()
    groups = {"vocab_parallel_group": own_group}
    for name in ("ClippedPGLossFn", "NLLLoss", "DPOLossFn"):
        loss_fn = FIRST[name]()
        batch = data | {"reference_policy_logprobs": data["prev_logprobs"]}
        for call in (loss_fn, lambda *args, loss_fn=loss_fn, **named: SECOND["prepare_loss_input"](
                args[0], args[1], loss_fn, **named)):  # fmt: skip
            with pytest.raises(AssertionError, match="vocab_parallel_rank must be provided when vocab_parallel_group"):
                call(logits.clone(), batch, *COUNTS, **groups)
            call(logits.clone(), batch, *COUNTS, vocab_parallel_rank=0, **groups)


# ---- private methods that the documentation of both generations lists


def test_the_dpo_loss_by_its_private_methods(nemo):
    logits, data = pair_case()
    loss_fn = nemo.DPOLossFn({"reference_policy_kl_penalty": 0.2})
    want, metrics = nemo.call(loss_fn, logits.clone(), data)
    for found in (
        loss_fn._dpo_loss(logits.clone(), data, COUNTS[0]),
        loss_fn._dpo_loss(logprobs_of(logits, data), data, COUNTS[0]),
        loss_fn._dpo_loss(next_token_logprobs=logprobs_of(logits, data), data=data, global_valid_seqs=COUNTS[0]),
        loss_fn._preference_loss(logits.clone(), data, COUNTS[0], None, None),
    ):
        names = ("accuracy", "rewards_chosen_mean", "rewards_rejected_mean")
        assert [part.item() for part in found] == pytest.approx([want.item(), *(metrics[name] for name in names)])


def test_the_preference_loss_by_its_private_method(nemo):
    rewards, mask = torch.tensor([1.0, 0.5, 0.0, 2.0]), torch.ones(4)
    loss_fn = nemo.PreferenceLoss()
    loss, accuracy, chosen, rejected = loss_fn._preference_loss(rewards, mask, torch.tensor(4.0), 0.5)
    want = -(torch.tensor([0.25, -1.0]).sigmoid().log().mean())
    found = (loss.item(), accuracy.item(), chosen.item(), rejected.item())
    assert found == pytest.approx((want.item(), 0.5, 0.5, 1.25))
    assert [part.tolist() for part in loss_fn.split_output_tensor(rewards)] == [[1.0, 0.0], [0.5, 2.0]]


# ---- the differences, in the order of the list


def test_unknown_keys_are_refused_and_missing_keys_take_defaults(nemo):
    for make in (nemo.ClippedPGLossFn, nemo.DPOLossFn):
        with pytest.raises(KeyError, match="did you mean 'reference_policy_kl_penalty'"):
            make({"reference_policy_kl_penalt": 0.1})
    assert nemo.ClippedPGLossFn({}).ratio_clip_max == 0.2 and nemo.DPOLossFn({"val_period": 3}).preference_loss_weight


def test_means_divide_by_the_count_and_are_0_if_nothing_counts(nemo):
    logits, data = policy_case()
    tiny = (torch.tensor(5e-8), torch.tensor(5e-8))
    loss, _ = nemo.call(nemo.NLLLoss(), logits.clone(), data, tiny)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    assert loss.item() == pytest.approx(-(logprobs_of(logits, data) * mask).sum().item() / 5e-8, rel=1e-5)
    nothing = data | {"token_mask": torch.zeros_like(data["token_mask"])}
    assert nemo.call(nemo.ClippedPGLossFn(NO_KL), logits, nothing, (torch.zeros(()), torch.zeros(())))[0] == 0


def test_nan_does_no_harm_where_it_is_masked_and_is_named_where_it_counts(nemo):
    logits, data = policy_case()
    want = nemo.call(nemo.ClippedPGLossFn(NO_KL), logits.clone(), data)
    hidden = (data["token_mask"] * data["sample_mask"][:, None]) == 0
    data["advantages"] = data["advantages"].masked_fill(hidden, math.nan)
    assert nemo.call(nemo.ClippedPGLossFn(NO_KL), logits.clone(), data) == want
    data["advantages"][0, 3] = math.nan
    with pytest.raises(ValueError, match=r"ClippedPGLossFn is NaN: data\['advantages'\]\[0, 3\] is NaN"):
        nemo.call(nemo.ClippedPGLossFn(NO_KL), logits, data)


def test_log_ratios_saturate_at_20(nemo):
    logits, data = policy_case()
    results = []
    for far in (25.0, 90.0):
        distant = data | {"prev_logprobs": data["prev_logprobs"] - far}
        loss, metrics = nemo.call(nemo.ClippedPGLossFn(NO_KL), logits.clone(), distant)
        results.append((loss.item(), metrics["probs_ratio_max"], metrics["gen_kl_error"]))
    assert results[0] == results[1] and results[0][1] == pytest.approx(math.exp(20), rel=1e-6)


def test_a_pair_counts_only_if_both_sequences_do(nemo):
    logits, data = pair_case()
    data["sample_mask"] = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    _, metrics = nemo.call(nemo.DPOLossFn({}), logits.clone(), data, (torch.tensor(4.0), COUNTS[1]))
    without = {key: value[[0, 1, 4, 5]] for key, value in data.items()}
    _, want = nemo.call(nemo.DPOLossFn({}), logits[[0, 1, 4, 5]].clone(), without, (torch.tensor(4.0), COUNTS[1]))
    assert metrics["preference_loss"] == pytest.approx(want["preference_loss"])
    with pytest.raises(ValueError, match="3 sequences are not pairs"):
        nemo.call(nemo.DPOLossFn({}), logits[:3], {key: value[:3] for key, value in data.items()})


def test_a_value_loss_does_not_read_the_first_token():
    values = torch.tensor([[9.0, 1.0]])
    data = {"returns": torch.zeros(1, 2), "token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}
    loss, metrics = SECOND["MseValueLossFn"]({})(logits=values, data=data, global_valid_seqs=1, global_valid_toks=1)
    assert loss == 0.5 and metrics["values_max"] == 1.0


def test_num_valid_samples_is_the_sum_of_the_sample_mask(nemo):
    data, generator = batch_of(distillation_batch)
    logits = token_logits(generator, data, VOCAB)
    assert nemo.call(nemo.DistillationLossFn({}), logits, data)[1]["num_valid_samples"] == 5.0 < len(logits)


def test_streams_that_only_metrics_read_may_be_missing(nemo):
    logits, data = policy_case()
    loss, metrics = nemo.call(nemo.ClippedPGLossFn(NO_KL), logits.clone(), data)
    del data["generation_logprobs"]
    again, fewer = nemo.call(nemo.ClippedPGLossFn(NO_KL), logits, data)
    assert again == loss and metrics.keys() - fewer.keys() >= {"gen_kl_error", "approx_entropy"}


def test_the_kl_is_differentiated_with_the_tokens_probability(nemo):
    """The weight e^{lp − sg(lp)} of NeMo RL's newer generation adds k·∇log π to the gradient, in both generations."""
    logits, data = policy_case()
    zero = data | {"advantages": torch.zeros_like(data["advantages"])}
    leaf = logits.clone().requires_grad_()
    loss, _ = nemo.call(nemo.ClippedPGLossFn({"reference_policy_kl_penalty": 0.3}), leaf, zero)
    lp = logprobs_of(logits, data).requires_grad_()
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    x = data["reference_policy_logprobs"][:, 1:] - lp
    k3 = (x.exp() - 1 - x) * (lp - lp.detach()).exp()
    (0.3 * (k3 * mask).sum() / COUNTS[1]).backward()
    want = torch.autograd.grad(logprobs_of(leaf, data), leaf, lp.grad)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], want, rtol=1e-9, atol=1e-12)


def test_positive_examples_are_weighed_by_a_global_count(nemo):
    logits, data = policy_case()
    settings = NO_KL | {"positive_example_nll_weight": 1.0}
    _, metrics = nemo.call(nemo.ClippedPGLossFn(settings), logits, data)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None] * (data["rewards"] > 0)[:, None]
    want = -(logprobs_of(logits, data) * mask).sum().item() / COUNTS[1].item()
    assert metrics["positive_nll_loss"] == pytest.approx(want)


def test_a_temperature_in_the_batch_divides_the_logits(nemo):
    logits, data = policy_case()
    hot, _ = nemo.call(nemo.NLLLoss(), logits.clone(), data | {"temperature": torch.full((6,), 0.5)})
    torch.testing.assert_close(hot, nemo.call(nemo.NLLLoss(), logits / 0.5, data)[0])


def test_backward_writes_the_gradient_over_the_logits(nemo):
    logits, data = policy_case()
    leaf = logits.float().requires_grad_()
    given = leaf * 1.0
    loss, _ = nemo.call(nemo.NLLLoss(), given, data)
    loss.backward()
    torch.testing.assert_close(given.detach(), leaf.grad)


def test_a_token_past_the_end_of_its_packed_sequence_is_an_error():
    data, generator = batch_of(token_batch)
    data = {key: value[:1] for key, value in data.items()}  # eight tokens, of which all count
    logits, ends = token_logits(generator, data, VOCAB), (0, 6)
    first = FIRST["SequencePackingLossWrapper"](FIRST["NLLLoss"](), torch.tensor(ends))
    second = SECOND["SequencePackingLossWrapper"](SECOND["NLLLossFn"](), SECOND["prepare_loss_input"], ends)
    for wrapped in (first, second):
        with pytest.raises(ValueError, match=r"token_mask counts token \[0, 6\], but cu_seqlens_q ends"):
            wrapped(logits[:, :6], data, *COUNTS)


def test_prepared_logprobs_are_0_at_masked_tokens():
    logits, data = policy_case()
    inputs, _ = SECOND["prepare_loss_input"](logits, data, SECOND["NLLLossFn"]())
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    assert ((inputs["next_token_logprobs"] == 0) == (mask == 0)).all()


def test_a_draft_loss_returns_metrics_and_takes_its_group_by_name():
    data, generator = batch_of(token_batch)
    teacher, student = (token_logits(generator, data, VOCAB) for _ in range(2))
    loss_fn = SECOND["DraftCrossEntropyLossFn"](vocab_parallel_group=None)
    loss, metrics = loss_fn(
        teacher_logits=teacher, student_logits=student, token_mask=data["token_mask"], data=data,
        global_valid_seqs=COUNTS[0], global_valid_toks=COUNTS[1],
    )  # fmt: skip
    mask = data["token_mask"] * data["sample_mask"][:, None]
    want = -((teacher.softmax(-1) * student.log_softmax(-1)).sum(-1) * mask).sum() / COUNTS[1]
    assert loss.item() == pytest.approx(want.item()) and metrics["loss"] == loss.item()
    with pytest.raises(TypeError):
        SECOND["DraftCrossEntropyLossFn"]("a group")


def test_fused_logprobs_are_not_there(nemo):
    with pytest.raises(TypeError, match="use_fused_linear_logprobs"):
        nemo.ClippedPGLossFn({}, use_fused_linear_logprobs=True)


OVER_SEQUENCES = CORRECTED | {"token_level_loss": False}
NORMALIZED = [
    {"reference_policy_kl_penalty": 0.1, "positive_example_nll_weight": 0.5},
    OVER_SEQUENCES | {"reference_policy_kl_penalty": 0.1},
    OVER_SEQUENCES | {"sequence_level_importance_ratios": True},
    CORRECTED | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.0},
    CORRECTED | {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 1.01,
                 "truncated_importance_sampling_ratio_min": 0.99},
    NO_KL | {"fixed_sequence_length": 8},
    NO_KL | {"sequence_rejection_type": "k3", "sequence_rejection_max": 0.01},
    NO_KL | {"token_veto_threshold": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("cfg", NORMALIZED)
def test_metric_normalizations_say_which_count_divides_each_metric(nemo, cfg):
    """A trainer may pass counts of 1, and divide the metrics itself when it knows the counts."""
    kinds = MODULES["nemo_rl.algorithms.loss.interfaces"]["MetricNormalizer"]
    divisors = {kinds.TOKENS: COUNTS[1].item(), kinds.SEQUENCES: COUNTS[0].item(), kinds.NONE: 1.0}
    logits, data = policy_case()
    loss_fn = nemo.ClippedPGLossFn(cfg)
    _, sums = nemo.call(loss_fn, logits.clone(), data, (torch.tensor(1.0), torch.tensor(1.0)))
    _, want = nemo.call(loss_fn, logits, data)
    assert isinstance(loss_fn.metric_normalizations, dict) and sums.keys() <= loss_fn.metric_normalizations.keys()
    found = {name: value / divisors[loss_fn.metric_normalizations[name]] for name, value in sums.items()}
    assert found == pytest.approx(want)
    assert pickle.loads(pickle.dumps(loss_fn)).metric_normalizations == loss_fn.metric_normalizations


def test_the_formulas_are_the_cores(nemo):
    assert nemo.ClippedPGLossFn.input_type is LossInputType.LOGPROB
    assert MODULES["nemo_rl.algorithms.utils"]["masked_mean"] is F.masked_mean
