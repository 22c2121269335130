"""What every public callable does with an empty, tiny, masked, infinite or contradictory input, row by row.

`tests/contract/edge_rows.py` has the table. Every loss of the registry has the rows of `LOSS_ROWS` besides.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_megatron
from rl_megatron import logprobs
from rl_megatron.algorithms import advantages
from rl_megatron.algorithms.advantages import group_relative
from rl_megatron.batching import microbatch_plan, packing, rank_plan
from rl_megatron.batching.packing import pack_sequences
from rl_megatron.data import batch as core_batch
from rl_megatron.evaluation import statistics as eval_statistics
from rl_megatron.generation import sampling as generation_sampling
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.sampling import sample
from rl_megatron.losses import LOSSES, build_loss, functional
from tests.contract.edge_rows import ROWS, Refused
from tests.contract.loss_cases import CASES, VOCAB
from tests.contract.test_losses import valid_counts

# Every public function and class of these modules has a row, by its name.
MODULES = (
    advantages, eval_statistics, functional, packing, microbatch_plan, rank_plan, logprobs, core_batch,
    generation_sampling,
)  # fmt: skip
# Name → why it has no row.
WITHOUT_ROW = {
    "round_up": "it gets numbers that others have checked",
    "require_fitting": "pack_sequences calls it", "require_within_width": "the planners call it",
    "split_packs": "plan_sequence_packing calls it", "concatenative": "pack_sequences calls it",
    "first_fit_decreasing": "pack_sequences calls it", "modified_first_fit_decreasing": "pack_sequences calls it",
    "require_key": "sequence_lengths calls it",
    "RankPlan": "a result", "LengthPlan": "a result", "LogprobStats": "a result",
    "TeacherDivergences": "a result", "ProblemSamples": "an input of compute_problem_values",
    "Change": "a result", "Estimate": "a result",
    "DeferredLogits": "its reader is linear_logprobs", "Sharding": "a description",
    "next_token_stats": "the losses' rows",
    "teacher_divergences": "the rows of full_distillation",
}  # fmt: skip
# Names of `rl_megatron` → where their edges are tested, if not in the table.
ELSEWHERE = {
    "Metric": "tests/unit/config", "Segment": "tests/unit/rollouts",
    "MegatronPolicy": "tests/parallel/test_policy_edges.py", "EmbeddedEngine": "tests/parallel/test_policy_edges.py",
    "generate": "tests/parallel/test_policy_edges.py",
    "NLLLoss": "the rows of the registry's losses",
    "as_loss": "tests/unit/losses/test_foreign.py", "load_config": "tests/unit/config",
    "parse_settings": "tests/unit/config", "section": "tests/unit/config", "start_topology": "tests/unit/topology",
    "train": "tests/unit/api", "run": "tests/unit/api", "sft": "tests/unit/api", "grpo": "tests/unit/api",
    "dpo": "tests/unit/api", "check_problems": "tests/unit/algorithms", "declare_metrics": "tests/unit/config",
    "declare_token_keys": "tests/unit/batching", "Sampler": "tests/unit/algorithms", "Stage": "tests/unit/algorithms",
}  # fmt: skip
NO_INPUT = ("Config", "register_", "Loss", "Engine")  # declarations, decorators and base classes


def same(got, want):
    """Return whether two results are equal; tensors have to agree in shape, and NaN equals NaN."""
    if isinstance(want, torch.Tensor):
        return got.shape == want.shape and torch.allclose(got.double(), want.double(), 1e-5, 1e-6, equal_nan=True)
    if isinstance(want, tuple) and not hasattr(want, "_fields"):
        return len(got) == len(want) and all(map(same, got, want))
    return got == want


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_edge_has_the_value_or_the_named_error_of_its_row(row):
    if isinstance(row.expected, Refused):
        with pytest.raises(row.expected.kind, match=row.expected.words):
            row.call()
    else:
        assert same(found := row.call(), row.expected), found


def test_no_row_is_there_twice():
    assert len({str(row) for row in ROWS}) == len(ROWS)


def public_names(module):
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    values = {name: getattr(module, name) for name in names}
    return [
        name
        for name, value in values.items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and (value.__module__ == module.__name__ or "__all__" in vars(module))
    ]


def test_every_public_callable_has_a_row_or_says_why_not():
    rows = {row.callable for row in ROWS} | {row.callable.partition(".")[0] for row in ROWS}
    found = [name for module in MODULES for name in public_names(module)]
    assert not [name for name in found if name not in rows and name not in WITHOUT_ROW]
    assert set(WITHOUT_ROW) <= set(found) - rows, "a name that has rows, or is not there any more"


def test_every_name_of_the_package_has_a_row_or_says_where_it_is_tested():
    in_table = {row.callable.removeprefix("rl_megatron.") for row in ROWS}
    callables = [
        name
        for name in rl_megatron.__all__
        if name != "__version__" and name not in in_table and not any(part in name for part in NO_INPUT)
    ]
    plain = [name for name in callables if name not in ELSEWHERE]
    for name in plain:  # what is left are classes of data: enums, protocols, and dataclasses without a rule
        value = getattr(rl_megatron, name)
        assert inspect.isclass(value) and "__post_init__" not in vars(value), f"{name} needs a row"


# --- the losses of the registry ---

OF_NAME = {case.name: case for case in reversed(CASES)}
every_loss = pytest.mark.parametrize("case", OF_NAME.values(), ids=str)


def loss_of(case):
    generator = torch.Generator().manual_seed(0)
    batch = case.make_batch(generator)
    return build_loss(case.name, case.cfg), batch, case.make_output(generator, batch, VOCAB)


def cut(mapping, sequences=None, tokens=None):
    """Return the first sequences, and the first tokens of what has them."""
    first = {key: value[:sequences] for key, value in mapping.items()}
    return first if tokens is None else {key: v[:, :tokens] if v.dim() > 1 else v for key, v in first.items()}


def called(loss, batch, output, counts=None):
    """Return (loss, its gradient) of a call with the model's output."""
    leaf = output.detach().clone().requires_grad_()
    value, _ = loss(leaf, batch, *(counts or valid_counts(batch)))
    return value, torch.autograd.grad(value, leaf, allow_unused=True)[0]


def both_cut(case, **sizes):
    loss, batch, output = loss_of(case)
    both = cut({**batch, "output": output}, **sizes)
    return loss, {key: value for key, value in both.items() if key != "output"}, both["output"]


ZERO_INPUTS = {
    "empty": lambda case: both_cut(case, sequences=0),
    "one token": lambda case: both_cut(case, tokens=1),
    "all masked": lambda case: masked(*loss_of(case)),
}


def masked(loss, batch, output):
    return loss, batch | {"token_mask": torch.zeros_like(batch["token_mask"])}, torch.full_like(output, math.nan)


@every_loss
@pytest.mark.parametrize("name", ZERO_INPUTS)
def test_a_loss_without_a_token_that_counts_is_zero(case, name):
    loss, batch, output = ZERO_INPUTS[name](case)
    value, gradient = called(loss, batch, output)
    assert value == 0 and (gradient is None or (gradient == 0).all())


@every_loss
def test_a_loss_of_one_group_is_finite_and_moves(case):
    loss, batch, output = both_cut(case, sequences=build_loss(case.name, case.cfg).group_size)
    value, gradient = called(loss, batch, output)
    assert value.isfinite() and gradient.isfinite().all() and gradient.any()


@every_loss
def test_a_loss_of_equal_outputs_is_finite(case):
    loss, batch, output = loss_of(case)
    value, gradient = called(loss, batch, torch.zeros_like(output))
    assert value.isfinite() and gradient.isfinite().all()


@every_loss
def test_a_loss_of_sequences_without_a_token_is_refused(case):
    loss, batch, output = both_cut(case, tokens=0)
    with pytest.raises(ValueError, match="at least one"):
        called(loss, batch, output)


@every_loss
def test_a_count_that_is_none_is_refused(case):
    loss, batch, output = loss_of(case)
    for count in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match="must be a count"):
            called(loss, batch, output, (count, count))


@every_loss
def test_a_missing_key_is_named_with_the_nearest_one(case):
    loss, batch, output = loss_of(case)
    for key in {*loss.required_keys} - {"token_mask", "sample_mask", *case.outputs_in_batch}:
        misspelt = {(f"{name}s" if name == key else name): value for name, value in batch.items()}
        with pytest.raises(KeyError, match=rf"{type(loss).__name__} needs data\['{key}'\].*did you mean '{key}s'"):
            called(loss, misspelt, output)


@every_loss
def test_tensors_of_other_sizes_are_refused_by_name(case):
    loss, batch, output = loss_of(case)
    for key in loss.required_keys:
        if key in batch and batch[key].is_floating_point():
            with pytest.raises(ValueError, match=key.replace("teacher_logits", "teacher")):
                called(loss, batch | {key: batch[key][:2]}, output, (1, 1))
    with pytest.raises(ValueError, match=r"\(2, 8"):
        called(loss, batch, output[:2])


@every_loss
def test_a_loss_that_infinite_outputs_make_nan_names_them(case):
    loss, batch, output = loss_of(case)
    try:
        value, _ = called(loss, batch, torch.full_like(output, -math.inf))
    except ValueError as refused:
        assert "is infinite and not masked" in str(refused) or "is NaN and not masked" in str(refused)
    else:
        assert not value.isnan()


def test_every_loss_of_the_registry_is_in_the_rows():
    assert set(OF_NAME) == set(LOSSES)


# --- properties ---

some = settings(max_examples=50, deadline=None)
numbers = st.floats(-4, 4, width=32)


@some
@given(st.lists(st.tuples(numbers, st.booleans()), max_size=6))
def test_a_masked_mean_is_that_of_the_values_that_count(entries):
    values = torch.tensor([value if counts else math.nan for value, counts in entries])
    mask = torch.tensor([float(counts) for _, counts in entries])
    counted = [value for value, counts in entries if counts]
    assert functional.masked_mean(values, mask).item() == pytest.approx(sum(counted) / max(len(counted), 1), abs=1e-6)
    assert functional.masked_min(values, mask).item() == min(counted, default=math.inf)
    assert functional.masked_max(values, mask).item() == max(counted, default=-math.inf)


@some
@given(st.lists(numbers, max_size=6), st.integers(-1, 4))
def test_groups_are_compared_if_they_are_whole_and_refused_otherwise(rewards, size):
    if size < 1 or len(rewards) % size:
        with pytest.raises(ValueError, match=r"group_size|do not form groups"):
            group_relative(torch.tensor(rewards), size)
        return
    found = group_relative(torch.tensor(rewards), size, normalize_std=False).view(-1, size)
    assert found.isfinite().all() and (found.sum(1).abs() < 1e-4).all()


@some
@given(
    st.lists(st.integers(-1, 5), max_size=6), st.integers(-1, 6), st.sampled_from(sorted(packing.ALGORITHMS))
)  # fmt: skip
def test_packs_have_every_sequence_once_or_are_refused(lengths, capacity, algorithm):
    if capacity < 1 or any(not 0 <= length <= capacity for length in lengths):
        with pytest.raises(ValueError, match="a pack holds|has length"):
            pack_sequences(lengths, capacity, algorithm)
        return
    packs = pack_sequences(lengths, capacity, algorithm)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(pack and sum(lengths[index] for index in pack) <= capacity for pack in packs)


@some
@given(
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 3.0]), min_size=1, max_size=6),
    st.floats(0, 1, exclude_max=True, width=32), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 7),
    st.sampled_from([0.1, 0.9, 1.0]),
)  # fmt: skip
def test_a_sampled_token_has_a_probability(scores, uniform, temperature, top_k, top_p):
    logits, sampling = torch.tensor([scores]), Sampling(1, temperature, top_k, top_p)
    chosen, logprob = sample(logits, torch.tensor([uniform]), sampling, None, len(scores))
    assert 0 <= chosen < len(scores)
    if max(scores) > -math.inf:
        assert logits[0, chosen] > -math.inf and logprob.isfinite()
