"""`as_loss`: how any loss function that a policy is given becomes a `Loss` that a runner can run."""

import functools
import math
import pickle

import pytest
import torch

from rl_megatron.logprobs import DeferredLogits, Sharding
from rl_megatron.losses import (
    LOSSES,
    LossInputType,
    LossType,
    NLLLoss,
    Reduction,
    as_loss,
    build_loss,
)
from rl_megatron.losses.contract import takes_logprobs

BATCH = {
    "input_ids": torch.tensor([[3, 1, 4, 1], [5, 2, 0, 0]]),
    "token_mask": torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]),
    "sample_mask": torch.ones(2),
}
COUNTS = (torch.tensor(2.0), torch.tensor(3.0))
LOGITS = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))


def run(loss_fn, logits=LOGITS, batch=BATCH):
    loss = as_loss(loss_fn)
    return loss.evaluate(batch, *COUNTS, **loss.read_output(logits, batch, Sharding()))


def test_a_function_of_logprobs_is_a_loss_and_an_object_has_to_say_so():
    assert takes_logprobs(lambda data, sequences, tokens, next_token_logprobs: None)
    assert not takes_logprobs(lambda data, sequences, tokens, logits: None)
    assert takes_logprobs(Protocol()) and not takes_logprobs(object())


class Protocol:
    """It follows `LossFunction` and no more."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs):
        self.logprobs = next_token_logprobs
        mask = data["token_mask"][:, 1:]
        return -(next_token_logprobs * mask).sum() / global_valid_toks, {"mine": 0.5}


class OfPairs(Protocol):
    group_size, required_keys = 2, ("advantages",)
    metric_reductions = {"mine": Reduction.MAX}


class Scaled:
    """A call of its own, from a class that is not a loss."""

    def __call__(self, *args, **inputs):
        loss, metrics = super().__call__(*args, **inputs)
        return 10 * loss, metrics


class ScaledNLL(Scaled, NLLLoss):
    """It inherits its call."""


class OwnCall(NLLLoss):
    def __call__(self, *args, **inputs):
        loss, metrics = super().__call__(*args, **inputs)
        return 10 * loss, metrics | {"calls": 1}


def test_a_loss_with_its_own_call_needs_the_keys_of_its_formula():
    class Needy(OwnCall):
        required_keys = ("advantages",)

    assert as_loss(Needy()).required_keys == ("advantages",)


@pytest.mark.parametrize("name", LOSSES)
def test_our_losses_are_returned_as_they_are(name):
    loss = build_loss(name)
    assert as_loss(loss) is loss


@pytest.mark.parametrize("loss_fn", [Protocol(), OwnCall(), ScaledNLL()], ids=lambda loss: type(loss).__name__)
def test_a_foreign_loss_is_wrapped_once(loss_fn):
    wrapped = as_loss(loss_fn)
    assert wrapped is not loss_fn and as_loss(wrapped) is wrapped
    assert wrapped.display_name == type(loss_fn).__name__
    assert (wrapped.loss_type, wrapped.input_type) == (LossType.TOKEN_LEVEL, LossInputType.LOGPROB)


@pytest.mark.parametrize("loss_fn", [OwnCall(), ScaledNLL()], ids=lambda loss: type(loss).__name__)
def test_an_overridden_call_is_used_even_if_it_is_inherited(loss_fn):
    plain, _ = run(NLLLoss())
    loss, metrics = run(loss_fn)
    torch.testing.assert_close(loss, 10 * plain)
    assert metrics["num_valid_samples"] == 2.0 and ("calls" in metrics) == isinstance(loss_fn, OwnCall)


def test_an_object_that_follows_the_protocol_is_given_logprobs_with_0_at_masked_tokens():
    loss_fn = Protocol()
    loss, metrics = run(loss_fn)
    torch.testing.assert_close(loss, run(NLLLoss())[0])
    assert metrics == {"mine": 0.5} and (loss_fn.logprobs[BATCH["token_mask"][:, 1:] == 0] == 0).all()


def test_the_batchs_temperature_applies_to_a_foreign_loss():
    hot = BATCH | {"temperature": torch.full((2,), 0.5)}
    torch.testing.assert_close(run(Protocol(), batch=hot)[0], run(NLLLoss(), LOGITS / 0.5)[0])


def test_what_a_foreign_loss_declares_is_read_and_the_rest_has_defaults():
    plain, declared = as_loss(Protocol()), as_loss(OfPairs())
    assert (plain.group_size, plain.required_keys, plain.metric_reductions) == (1, (), {})
    assert (declared.group_size, declared.required_keys) == (2, ("advantages",))
    assert declared.metric_reductions == {"mine": Reduction.MAX}
    assert declared.next_token_keys == frozenset()


@pytest.mark.parametrize("input_type", [LossInputType.LOGIT, LossInputType.DRAFT, None])
def test_a_foreign_loss_that_does_not_take_logprobs_is_refused(input_type):
    class Other(Protocol):
        pass

    Other.input_type = input_type
    with pytest.raises(TypeError, match=rf"Other has input_type={input_type}, .* derive it from Loss"):
        as_loss(Other())


def test_messages_name_a_function_that_is_a_loss():
    def mine(data, global_valid_seqs, global_valid_toks, logprobs): ...

    with pytest.raises(TypeError, match=r"mine has input_type=None, .* derive it from Loss"):
        as_loss(mine)
    mine.input_type = LossInputType.LOGPROB
    assert as_loss(mine).display_name == "mine"


@pytest.mark.parametrize("loss_fn", [NLLLoss(), OwnCall()], ids=["formula", "own call"])
def test_a_nan_is_returned_so_that_other_ranks_can_be_told(loss_fn):
    logits = LOGITS.clone()
    logits[0, 1] = math.nan
    loss, metrics = run(loss_fn, logits)
    assert math.isnan(loss) and math.isnan(float(metrics["loss"]))


def test_wrapped_losses_can_be_pickled():
    for loss_fn in (Protocol(), OwnCall()):
        again = pickle.loads(pickle.dumps(as_loss(loss_fn)))
        assert run(again)[0] == run(loss_fn)[0]


class OwnReading(NLLLoss):
    """It reads the output in a way of its own, which needs a tensor."""

    def read_output(self, output, data, sharding):
        return super().read_output(output * 1, data, sharding)


class FromAMixin:
    def read_output(self, output, data, sharding):
        return super().read_output(output * 1, data, sharding)


class OwnReadingOfBoth(OwnReading):
    reads = "logprobs"

    def read_output(self, output, data, sharding):
        return super().read_output(output, data, sharding)


class Mixed(FromAMixin, NLLLoss):
    pass


def test_a_loss_with_its_own_read_output_is_given_whole_logits_until_it_declares_otherwise():
    reads = {loss: as_loss(loss()).reads for loss in (NLLLoss, OwnReading, Mixed, OwnReadingOfBoth, Protocol, OwnCall)}
    assert reads == {
        NLLLoss: "logprobs", OwnReading: "logits", Mixed: "logits", OwnReadingOfBoth: "logprobs", Protocol: "logprobs",
        OwnCall: "logits",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["nll", "clipped_pg", "dpo", "ipo", "distillation"])
def test_losses_over_logits_read_deferred_logits(name):
    assert build_loss(name).reads == "logprobs"


@pytest.mark.parametrize("name", ["preference", "mse_value", "draft_cross_entropy"])
def test_losses_that_need_the_output_itself_do_not(name):
    assert build_loss(name).reads == "logits"


def test_a_foreign_loss_reads_deferred_logits_as_ours_do():
    hidden, weight = torch.randn(4, 2, 3), torch.randn(6, 3)
    deferred = DeferredLogits(hidden, weight, 1)
    logits = (hidden @ weight.T).transpose(0, 1)
    torch.testing.assert_close(run(Protocol(), deferred)[0], run(Protocol(), logits)[0])


class WrappedCall(NLLLoss):
    @functools.wraps(NLLLoss.__call__)
    def __call__(self, *args, **inputs):
        loss, metrics = super().__call__(*args, **inputs)
        return 10 * loss, metrics


def test_a_call_that_wraps_the_inherited_one_is_used():
    torch.testing.assert_close(run(WrappedCall())[0], 10 * run(NLLLoss())[0])
