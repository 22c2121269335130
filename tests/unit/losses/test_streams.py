"""Reading a batch: dtypes that make no sense are named, and so is the NaN that spoils a loss."""

import math

import pytest
import torch

from rl_megatron.losses import ClippedPGLossFn, DPOLossFn, MSEValueLoss, NLLLoss, PreferenceLoss, build_loss
from rl_megatron.losses.streams import find_nan
from tests.contract.loss_cases import VOCAB, pair_batch, policy_batch, token_logits, value_batch

BATCH = policy_batch(torch.Generator().manual_seed(0))
LOGITS = token_logits(torch.Generator().manual_seed(0), BATCH, VOCAB)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "input_ids",
            BATCH["input_ids"].double(),
            r"ClippedPGLossFn: data\['input_ids'\] is float64; it must hold ids",
        ),
        ("input_ids", BATCH["input_ids"].bool(), r"data\['input_ids'\] is bool; it must hold ids, in an integer dtype"),
        ("input_ids", BATCH["input_ids"].tolist(), r"data\['input_ids'\] must be a tensor, got list"),
        (
            "token_mask",
            BATCH["token_mask"].cfloat(),
            r"data\['token_mask'\] is complex64; it must hold booleans or real",
        ),
        ("sample_mask", BATCH["sample_mask"].cfloat(), r"data\['sample_mask'\] is complex64"),
        ("sample_mask", None, r"data\['sample_mask'\] must be a tensor, got NoneType"),
        ("advantages", BATCH["advantages"].cdouble(), r"data\['advantages'\] is complex128; it must hold real numbers"),
        ("advantages", BATCH["advantages"] > 0, r"data\['advantages'\] is bool; it must hold real numbers"),
        ("advantages", BATCH["advantages"][:, 0] > 0, r"data\['advantages'\] is bool"),
        ("prev_logprobs", BATCH["prev_logprobs"].numpy(), r"data\['prev_logprobs'\] must be a tensor, got ndarray"),
        ("rewards", BATCH["rewards"] > 0, r"data\['rewards'\] is bool"),
    ],
)
def test_dtypes_are_named(key, value, message):
    loss_fn = ClippedPGLossFn({"positive_example_nll_weight": 1.0})
    with pytest.raises(TypeError, match=message):
        loss_fn(LOGITS, BATCH | {key: value}, 5, 15)


def test_inputs_of_a_wrong_dtype_are_named():
    with pytest.raises(TypeError, match="NLLLoss: next_token_logprobs is complex64"):
        NLLLoss()(BATCH, 5, 15, next_token_logprobs=LOGITS[:, :-1, 0].cfloat())
    with pytest.raises(TypeError, match="PreferenceLoss: rewards is bool"):
        PreferenceLoss()(BATCH, 5, 15, rewards=torch.ones(6, dtype=torch.bool))


def test_integer_streams_and_masks_are_numbers():
    batch = BATCH | {"advantages": torch.ones_like(BATCH["input_ids"]), "token_mask": BATCH["token_mask"].long()}
    real = BATCH | {"advantages": torch.ones_like(BATCH["advantages"])}
    assert ClippedPGLossFn()(LOGITS, batch, 5, 15)[0] == ClippedPGLossFn()(LOGITS, real, 5, 15)[0]


NO_KL = {"reference_policy_kl_penalty": 0.0}


@pytest.mark.parametrize(
    ("name", "cfg", "key"),
    [
        ("clipped_pg", NO_KL, "advantages"),
        ("clipped_pg", NO_KL, "prev_logprobs"),
        ("mse_value", {}, "returns"),
        ("mse_value", {"cliprange": 0.2}, "values"),
        ("nll", {}, "next_token_logprobs"),
        ("clipped_pg", NO_KL, "next_token_logprobs"),
    ],
)
def test_a_dimension_too_many_is_refused_where_it_would_broadcast(name, cfg, key):
    """One row, [1, S, 1]: every stream would silently meet every other token's."""
    batch = {
        key: torch.ones(1, 4) for key in ("token_mask", "advantages", "prev_logprobs", "returns", "values")
    } | {"sample_mask": torch.ones(1)}  # fmt: skip
    stream = "next_token_values" if name == "mse_value" else "next_token_logprobs"
    inputs = {stream: torch.zeros(1, 3)}
    build_loss(name, cfg).evaluate(batch, 1, 3, **inputs)
    for where in (batch, inputs):
        if key in where:
            where[key] = where[key][..., None]
    with pytest.raises(ValueError, match=rf"{key}.* \(1, [34], 1\)"):
        build_loss(name, cfg).evaluate(batch, 1, 3, **inputs)


class TestFirstNaN:
    def test_what_the_loss_reads_comes_first(self):
        nan = torch.full((1, 3), torch.nan)
        batch = {"unread": nan, "returns": nan, "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
        assert find_nan(batch, {"values": nan[:, 1:]}) == "values[0, 0]"
        assert find_nan(batch, {"values": nan[:, 1:]}, ("returns",)) == "data['returns'][0, 0]"
        assert find_nan(batch, {}, ("token_mask", "returns")) == "data['returns'][0, 0]"
        assert find_nan(batch, {}) == "data['unread'][0, 0]"

    def test_none_where_only_masked_entries_are(self):
        batch = {key: value.clone() for key, value in BATCH.items()}
        batch["advantages"][:, :2] = math.nan  # prompts
        batch["rewards"][2] = math.nan  # a masked sample
        assert find_nan(batch, {}) is None
        batch["advantages"][3, 2] = math.nan
        assert find_nan(batch, {}) == "data['advantages'][3, 2]"

    def test_inputs_are_aligned_with_the_next_token(self):
        logprobs = torch.zeros(6, 7)
        logprobs[0, [0, 1]] = math.nan  # of tokens 1 and 2, of which 2 counts
        assert find_nan(BATCH, {"next_token_logprobs": logprobs}) == "next_token_logprobs[0, 1]"

    def test_streams_with_more_dimensions(self):
        wide = torch.zeros(6, 8, 3)
        wide[0, 4, 2] = math.nan
        assert find_nan(BATCH | {"teacher": wide}, {}) == "data['teacher'][0, 4, 2]"

    def test_rolled_streams(self):
        """Row 0 counts tokens 2 … 7: entries 1 … 6 of what is rolled by −1."""
        batch = pair_batch(torch.Generator().manual_seed(0))
        for position, named in [((0, 0), False), ((0, 1), True), ((0, 6), True), ((0, 7), False)]:
            rolled = batch["reference_policy_logprobs"].clone()
            rolled[position] = math.nan
            found = find_nan(batch | {"reference_policy_logprobs": rolled}, {}, (), DPOLossFn.next_token_keys)
            assert found == (f"data['reference_policy_logprobs'][0, {position[1]}]" if named else None)

    def test_tensors_that_are_no_streams_are_passed_over(self):
        batch = pair_batch(torch.Generator().manual_seed(0))
        others = {"rates": torch.full((3,), math.nan), "scale": torch.tensor(math.nan), "names": ["a", "b"]}
        assert find_nan(others | batch, {}, (), frozenset()) is None


@pytest.mark.parametrize(
    ("loss_fn", "make_batch", "output", "position", "name"),
    [
        (NLLLoss(), policy_batch, LOGITS, (0, 3, 0), r"next_token_logprobs\[0, 3\]"),
        (MSEValueLoss(), value_batch, LOGITS[..., 0], (1, 2), r"next_token_values\[1, 2\]"),
        (PreferenceLoss(), policy_batch, LOGITS[..., 0], (1, 4), r"rewards\[1\]"),
        (PreferenceLoss(), policy_batch, LOGITS[:, 0, 0], (1,), r"rewards\[1\]"),
    ],
)
def test_a_nan_in_the_output_is_named_as_the_loss_reads_it(loss_fn, make_batch, output, position, name):
    output = output.clone()
    output[position] = math.nan
    with pytest.raises(ValueError, match=rf"{type(loss_fn).__name__} is NaN: {name} is NaN and not masked"):
        loss_fn(output, make_batch(torch.Generator().manual_seed(0)), 5, 15)
