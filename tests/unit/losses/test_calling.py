"""The registry, the two calling forms, and NLLLoss with its per-sample form."""

import collections
import math
import pickle
import re

import pytest
import torch

from rl_megatron.losses import (
    LOSSES,
    ClippedPGLossFn,
    LossFunction,
    LossInputType,
    LossType,
    NLLLoss,
    build_loss,
    register_loss,
)

BATCH = {
    "input_ids": torch.tensor([[3, 1, 4, 1], [5, 2, 0, 0], [2, 2, 2, 2]]),
    "token_mask": torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]]),
    "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
}
LOGITS = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
LOGPROBS = LOGITS.log_softmax(-1)[:, :-1].gather(-1, BATCH["input_ids"][:, 1:, None])[..., 0]


def test_enum_values():
    assert {t.name: t.value for t in LossType} == {"TOKEN_LEVEL": "token_level", "SEQUENCE_LEVEL": "sequence_level"}
    assert {t.value for t in LossInputType} == {"logit", "logprob", "distillation", "draft"}


def test_registry():
    assert LOSSES["clipped_pg"] is ClippedPGLossFn and LOSSES["nll"] is NLLLoss
    assert build_loss("clipped_pg", {"ratio_clip_max": 0.3}).cfg.ratio_clip_max == 0.3
    assert isinstance(build_loss("nll"), LossFunction)
    with pytest.raises(ValueError, match="no loss 'cliped_pg'; did you mean 'clipped_pg'"):
        build_loss("cliped_pg")
    with pytest.raises(ValueError, match=r"loss 'nll' is registered already, as rl_megatron\.losses\.nll\.NLLLoss"):
        register_loss("nll")(object)
    with pytest.raises(KeyError, match="no key 'beta'"):
        build_loss("nll", {"beta": 1})


class TestNLL:
    @pytest.mark.parametrize("shape", [(2,), (3, 5), (3, 4, 1)], ids=str)
    def test_a_temperature_of_another_shape_is_named(self, shape):
        with pytest.raises(ValueError, match=re.escape(f"temperature {shape} must be a number, [B]")):
            NLLLoss()(LOGITS, BATCH | {"temperature": torch.ones(shape)}, None, 10)

    def test_mean_over_the_global_tokens(self):
        loss, metrics = NLLLoss()(LOGITS, BATCH, None, 10)
        want = -(LOGPROBS[0, 1] + LOGPROBS[0, 2] + LOGPROBS[1, 0]).item() / 10
        assert loss.item() == pytest.approx(want, rel=1e-6)
        assert metrics == {"loss": loss.item(), "num_unmasked_tokens": 3.0, "num_valid_samples": 2.0}

    @pytest.mark.parametrize("average", [False, True])
    def test_one_value_per_sample(self, average):
        loss, metrics = NLLLoss()(LOGITS, BATCH, None, 10, dpo_loss=True, dpo_average_log_probs=average)
        first = -(LOGPROBS[0, 1] + LOGPROBS[0, 2]) / (2 if average else 1)
        want = torch.stack([first, -LOGPROBS[1, 0], torch.zeros(())])
        torch.testing.assert_close(loss, want)
        assert torch.equal(metrics["loss"], loss) and metrics["num_valid_samples"] == 2.0


class TestCallingForms:
    def test_positional_and_keyword_agree(self):
        loss_fn = NLLLoss()
        counts = {"global_valid_seqs": torch.tensor(2), "global_valid_toks": torch.tensor(3)}
        want = loss_fn(LOGITS, BATCH, *counts.values())[0]
        for got in (
            loss_fn(LOGITS, data=BATCH, **counts),
            loss_fn(next_token_logits=LOGITS, data=BATCH, **counts),
            loss_fn(LOGITS, BATCH, *counts.values(), None, None, None),
            loss_fn(BATCH, *counts.values(), next_token_logprobs=LOGPROBS),
            loss_fn(data=BATCH, **counts, next_token_logprobs=LOGPROBS),
            loss_fn(collections.UserDict(BATCH), *counts.values(), next_token_logprobs=LOGPROBS),
        ):
            torch.testing.assert_close(got[0], want)
            assert got[1]["num_valid_samples"] == 2.0

    def test_logprobs_by_position_are_distinguished_from_logits(self):
        want = NLLLoss()(LOGITS, BATCH, 2, 3)[0]
        torch.testing.assert_close(NLLLoss()(LOGPROBS, BATCH, 2, 3)[0], want)
        with pytest.raises(TypeError, match="both by position and by name"):
            NLLLoss()(LOGPROBS, BATCH, 2, 3, next_token_logprobs=LOGPROBS)

    def test_nll_takes_its_own_arguments_by_position(self):
        want = NLLLoss()(LOGITS, BATCH, 2, 3, dpo_loss=True, dpo_average_log_probs=True)[0]
        torch.testing.assert_close(NLLLoss()(LOGITS, BATCH, 2, 3, None, None, None, True, True)[0], want)

    @pytest.mark.parametrize("name", LOSSES)
    def test_a_loss_can_be_pickled(self, name):
        loss_fn = build_loss(name)
        assert pickle.loads(pickle.dumps(loss_fn)).cfg == loss_fn.cfg

    def test_the_ignored_id_at_a_token_that_counts_is_refused(self):
        ids = BATCH["input_ids"].clone()
        ids[1, 3] = ids[0, 0] = -100  # masked, and never predicted
        torch.testing.assert_close(NLLLoss()(LOGITS, {**BATCH, "input_ids": ids}, 2, 3)[0],
                                   NLLLoss()(LOGITS, BATCH, 2, 3)[0])  # fmt: skip
        ids[0, 2] = -100
        with pytest.raises(ValueError, match="input_ids has -100 at a token that is not masked"):
            NLLLoss()(LOGITS, {**BATCH, "input_ids": ids}, 2, 3)

    def test_padded_vocabulary(self):
        padded = torch.cat([LOGITS, torch.full((3, 4, 2), 9.0)], dim=-1)
        want = NLLLoss()(LOGITS, BATCH, 2, 3)[0]
        torch.testing.assert_close(NLLLoss()(padded, BATCH, 2, 3, valid_vocab_size=6)[0], want)

    @pytest.mark.parametrize("temperature", [0.5, torch.tensor(0.5), torch.full((3,), 0.5), torch.full((3, 4), 0.5)])
    def test_temperature_travels_in_the_batch(self, temperature):
        batch = {**BATCH, "temperature": temperature}
        want = NLLLoss()(LOGITS / 0.5, BATCH, 2, 3)[0]
        torch.testing.assert_close(NLLLoss()(LOGITS, batch, 2, 3)[0], want)

    def test_temperature_per_token_is_aligned_with_the_token(self):
        temperature = torch.ones(3, 4)
        temperature[0, 2] = 0.5  # the temperature at which token 2 was sampled, from the logits at position 1
        scaled = LOGITS.clone()
        scaled[0, 1] /= 0.5
        want = NLLLoss()(scaled, BATCH, 2, 3)[0]
        torch.testing.assert_close(NLLLoss()(LOGITS, {**BATCH, "temperature": temperature}, 2, 3)[0], want)

    def test_half_precision_logprobs_and_boolean_masks(self):
        batch = {key: value if key == "input_ids" else value.bool() for key, value in BATCH.items()}
        loss, _ = NLLLoss()(batch, 2, 3, next_token_logprobs=LOGPROBS.bfloat16())
        assert loss.dtype == torch.float32 and math.isfinite(loss)

    @pytest.mark.parametrize(
        ("args", "inputs", "message"),
        [
            ((), {"data": BATCH, "global_valid_seqs": 1, "global_valid_toks": 1}, "either next_token_logits or"),
            ((LOGITS, BATCH, 1, 1), {"next_token_logprobs": LOGPROBS}, "either next_token_logits or"),
            ((LOGITS, BATCH), {}, "missing.*global_valid_seqs.*global_valid_toks"),
            ((LOGITS, BATCH, 1, 1), {"data": BATCH}, "'data'.*both by position and by name"),
            ((LOGITS, BATCH, 1, 1, *[None] * 6), {}, "takes 9 positional"),
            ((LOGITS, BATCH, 1, 1), {"nonsense": 1}, "nonsense"),
        ],
    )
    def test_bad_calls(self, args, inputs, message):
        with pytest.raises(TypeError, match=message):
            NLLLoss()(*args, **inputs)

    def test_logits_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"logits \(3, 3, 6\).*input_ids \(3, 4\)"):
            NLLLoss()(LOGITS[:, :-1], BATCH, 2, 3)
