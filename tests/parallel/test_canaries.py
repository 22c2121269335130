"""Known silent bugs of megatron-core's parallelism (wrong numbers, no error), each shown not to reach a policy here.

One test per bug, named by the symptom it would show and citing the thread that reports it. A change of ours, or of
megatron-core, that lets the bug in fails here by name. Each compares with one process, or ranks with one another.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from rl_megatron.model.build import unwrap
from rl_megatron.policy.megatron_policy import MegatronPolicy
from tests.parallel.layouts import (
    DISTRIBUTED_OPTIMIZER,
    MODEL,
    OPTIMIZER,
    VOCAB_SIZE,
    build_policy,
    gradients,
    weights,
    worst_relative_error,
)

TOLERANCE = 1e-4
TENSOR, SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence": True}
PIPELINE, INTERLEAVED = {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}
CONTEXT = {"context": 2}
ROWS, LENGTH = 6, 16


def batch(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> BatchedDataDict:
    """Rows of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows,), generator=generator)
    return BatchedDataDict(
        input_ids=torch.randint(0, VOCAB_SIZE, (rows, length), generator=generator),
        input_lengths=lengths,
        token_mask=(torch.arange(length) < lengths[:, None]).float(),
        sample_mask=torch.ones(rows),
    )


def first_tokens_only(length: int = LENGTH) -> BatchedDataDict:
    """Every valid token is predicted from the first quarter of its row, which context-parallel rank 0 of 2 holds."""
    data = batch(length=length)
    positions, lengths = torch.arange(length), data["input_lengths"][:, None]
    data["token_mask"] = ((positions >= 1) & (positions <= length // 4) & (positions < lengths)).float()
    return data


def loss_and_gradients(
    parallel: dict, data: BatchedDataDict, mbs: int, recompute: str = "none"
) -> tuple[float, dict[str, torch.Tensor]]:
    policy = build_policy(parallel, model=dataclasses.replace(MODEL, recompute=recompute))
    policy.prepare_for_training()
    report = policy.accumulate_gradients(data, NLLLoss(), mbs)
    return report["loss"], gradients(policy)


def assert_equal(found: tuple[float, dict], wanted: tuple[float, dict]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    error, name = worst_relative_error(found[1], wanted[1])
    assert error <= TOLERANCE, (name, error)


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, loss_and_gradients, {}, batch(), ROWS)[0]


# --- tensor and sequence parallelism ---


def gradients_of_replicated_norms(parallel: dict) -> dict[str, torch.Tensor]:
    """This rank's own gradient of each norm; every tensor-parallel rank holds all of them."""
    policy = build_policy(parallel)
    policy.accumulate_gradients(batch(), NLLLoss())
    named = unwrap(policy.model.model_chunks[0]).named_parameters()
    return {name: parameter.main_grad.clone() for name, parameter in named if "norm" in name}


@pytest.fixture(scope="module")
def norms_of_one_process(ranks):
    return ranks.run(1, gradients_of_replicated_norms, {})[0]


def test_norms_do_not_learn_from_one_ranks_part_of_the_sequence(ranks, norms_of_one_process):
    """Under sequence parallelism a norm sees one part of the tokens per rank, and its gradient stayed that part's
    (NVIDIA/Megatron-LM issue 1446)."""
    for found in ranks.run(2, gradients_of_replicated_norms, SEQUENCE):
        error, name = worst_relative_error(found, norms_of_one_process)
        assert error <= TOLERANCE, (name, error)


def test_query_and_key_norms_do_not_learn_from_one_ranks_heads(ranks, norms_of_one_process):
    """Norms shared by all heads are replicated while the heads are sharded, so each rank has a partial gradient even
    without sequence parallelism, where it was never summed (NVIDIA/Megatron-LM issues 816 and 7452, finding 11)."""
    shared = {name: gradient for name, gradient in norms_of_one_process.items() if "q_layernorm" in name}
    assert len(shared) == MODEL.num_layers
    for found in ranks.run(2, gradients_of_replicated_norms, TENSOR):
        error, name = worst_relative_error(found, norms_of_one_process)
        assert error <= TOLERANCE, (name, error)


def loss_and_logprobs(parallel: dict) -> tuple[float, torch.Tensor]:
    policy = build_policy(parallel)
    return policy.train(batch(), NLLLoss(), eval_mode=True)["loss"], policy.get_logprobs(batch())["logprobs"]


def test_loss_is_not_off_by_the_logarithm_of_the_tensor_degree(ranks):
    """A vocabulary-parallel loss on logits that are whole already counts every token of the vocabulary once per rank:
    the loss is log(tensor) too high (NVIDIA/Megatron-LM issue 7452, finding 2)."""
    wanted_loss, wanted = ranks.reference(loss_and_logprobs, {})
    for loss, found in ranks.run(2, loss_and_logprobs, TENSOR):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def reductions_over_tensor_ranks(parallel: dict) -> tuple[int, int]:
    """How many tensors a training step sums over the tensor-parallel ranks, and how many of them have gaps."""
    policy, seen, reduce = build_policy(parallel), [], mappings._reduce

    def watched(input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        seen.append(input_.is_contiguous())
        return reduce(input_, group)

    mappings._reduce = watched
    try:
        policy.train(batch(), NLLLoss())
    finally:
        mappings._reduce = reduce
    return len(seen), seen.count(False)


def test_no_reduction_over_tensor_ranks_loses_its_result(ranks):
    """The all-reduce of a tensor that is not contiguous was done on a copy, and the unreduced tensor returned
    (NVIDIA/Megatron-LM issue 5337)."""
    for reductions, with_gaps in ranks.run(2, reductions_over_tensor_ranks, TENSOR):
        assert reductions > 0 and with_gaps == 0


# --- microbatches and context parallelism ---


@pytest.mark.parametrize("mbs", [1, 4])
def test_gradient_does_not_shrink_with_the_number_of_microbatches(ranks, one_process, mbs):
    """The schedule divides a loss by the number of microbatches, whatever it was normalised by before
    (areal-project/AReaL pull request 1273)."""
    assert_equal(ranks.run(1, loss_and_gradients, {}, batch(), mbs)[0], one_process)


def test_context_parallelism_does_not_multiply_the_gradient(ranks, one_process):
    """The schedule multiplies a loss by the context degree, for the data-parallel average to divide by it
    (NVIDIA/Megatron-LM issue 673); attention's own gradient came out wrong there too (issue 1464)."""
    assert_equal(ranks.run(2, loss_and_gradients, CONTEXT, batch(), ROWS)[0], one_process)


def test_a_context_rank_without_a_valid_token_spoils_nothing(ranks):
    """A rank all of whose tokens are masked divided zero by zero: NaN for everyone (NVIDIA/Megatron-LM issue 1764)."""
    data = first_tokens_only()
    wanted = ranks.run(1, loss_and_gradients, {}, data, ROWS)[0]
    found = ranks.run(2, loss_and_gradients, CONTEXT, data, ROWS)[0]
    assert all(gradient.isfinite().all() for gradient in found[1].values())
    assert_equal(found, wanted)


def test_tokens_keep_their_positions_under_context_parallelism(ranks):
    """Each rank's two chunks must be rotated by their positions in the whole sequence, not by those in the rank's part
    (NVIDIA/Megatron-LM issue 560); wrong ones show on both sides of every cut."""
    _, wanted = ranks.reference(loss_and_logprobs, {})
    for _, found in ranks.run(2, loss_and_logprobs, CONTEXT):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


# --- pipeline parallelism ---


def layers_built(parallel: dict, num_layers: int) -> list[str]:
    policy = build_policy(parallel, model=dataclasses.replace(MODEL, num_layers=num_layers))
    names = [layer.layer_number for chunk in policy.model.model_chunks for layer in unwrap(chunk).decoder.layers]
    forwards = []
    for chunk in policy.model.model_chunks:
        for layer in unwrap(chunk).decoder.layers:
            layer.register_forward_hook(lambda layer, *_: forwards.append(layer.layer_number))
    policy.get_logprobs(batch(rows=2), micro_batch_size=2)
    assert set(forwards) == set(names), (forwards, names)
    return names


@pytest.mark.parametrize("parallel, num_layers", [(PIPELINE, 6), (INTERLEAVED, 8)], ids=["stages", "interleaved"])
def test_no_layer_is_dropped_between_stages(ranks, parallel, num_layers):
    """A division that rounds down built 28 of 30 layers over 4 stages (NVIDIA/Megatron-LM issues 1304, 468, 2718)."""
    built = [number for rank in ranks.run(2, layers_built, parallel, num_layers) for number in rank]
    assert sorted(built) == list(range(1, num_layers + 1))


def refusal(parallel: dict, num_layers: int) -> str:
    with pytest.raises(ConfigError) as error:
        build_policy(parallel, model=dataclasses.replace(MODEL, num_layers=num_layers))
    return str(error.value)


def test_layers_that_do_not_divide_over_model_chunks_are_refused(ranks):
    """10 layers over 2 stages of 2 chunks trained as 8 (NVIDIA/Megatron-LM issue 468)."""
    assert "model.num_layers=10" in ranks.run(2, refusal, INTERLEAVED, 10)[0]


def test_two_interleaved_stages_do_not_swap_activations_and_gradients(ranks, one_process):
    """With two stages the next and the previous rank are the same one; batched sends went out in another order than
    they were received in, and activations arrived as gradients (NVIDIA/Megatron-LM issue 1450, pull request 7177)."""
    assert_equal(ranks.run(2, loss_and_gradients, INTERLEAVED, batch(), 1)[0], one_process)


def test_padding_microbatches_of_the_interleaved_schedule_change_nothing(ranks, one_process):
    """The interleaved schedule takes multiples of the pipeline degree only (volcengine/verl issue 6176); 3 microbatches
    are filled up to 4, and the fourth must leave loss and gradient alone."""
    assert_equal(ranks.run(2, loss_and_gradients, INTERLEAVED, batch(), 2)[0], one_process)


def tied_weights(parallel: dict, optimizer: OptimizerConfig) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """After two steps: this rank's copy of the tied embedding, and all weights, whole, on rank 0."""
    policy = build_policy(parallel, optimizer=optimizer)
    for seed in range(2):
        policy.train(batch(seed=seed), NLLLoss(), gbs=ROWS, mbs=3)
    model = unwrap(policy.model.model_chunks[-1 if policy.topology.is_last_stage else 0])
    return model.shared_embedding_or_output_weight().detach().clone(), weights(policy)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, DISTRIBUTED_OPTIMIZER], ids=["plain", "distributed"])
def test_tied_embeddings_stay_tied(ranks, optimizer):
    """First and last stage hold a copy each; where gradients are reduce-scattered before the copies' gradients are
    added, different parts of them met, and the copies drifted apart (NVIDIA/Megatron-LM issues 844 and 656)."""
    _, wanted = ranks.reference(tied_weights, {}, OPTIMIZER)
    found = ranks.run(4, tied_weights, PIPELINE, optimizer)
    for embedding, _ in found:
        assert torch.equal(embedding, found[0][0])
    error, name = worst_relative_error(found[0][1], wanted)
    assert error <= TOLERANCE, (name, error)


@pytest.mark.parametrize("parallel", [SEQUENCE, PIPELINE], ids=["sequence", "pipeline"])
def test_recomputed_activations_give_the_gradient_of_stored_ones(ranks, one_process, parallel):
    """Recomputation in backward repeats a layer's collectives; in a prediction module it did so over the wrong ranks,
    and mixed the data of others in (NVIDIA/Megatron-LM issue 7452, finding 4)."""
    assert_equal(ranks.run(2, loss_and_gradients, parallel, batch(), 3, "full")[0], one_process)


# --- the optimizer ---


def gradient_norm(parallel: dict, optimizer: OptimizerConfig) -> float:
    """The norm that clipping goes by."""
    policy = build_policy(parallel, optimizer=optimizer)
    policy.accumulate_gradients(batch(), NLLLoss())
    policy.optimizer.prepare_grads()
    return float(policy.optimizer.get_grad_norm())


@pytest.mark.parametrize("optimizer", [OPTIMIZER, DISTRIBUTED_OPTIMIZER], ids=["plain", "distributed"])
@pytest.mark.parametrize("parallel", [SEQUENCE, INTERLEAVED, CONTEXT], ids=["sequence", "interleaved", "context"])
def test_gradient_norm_counts_every_parameter_once(ranks, one_process, parallel, optimizer):
    """A shard that is not marked as one is left out on all ranks but the first, a copy that is marked counts on each:
    clipping goes by a wrong norm (NVIDIA/Megatron-LM pull requests 5916 and 7530, issue 7452 finding 8)."""
    wanted = torch.stack([gradient.norm() for gradient in one_process[1].values()]).norm().item()
    for norm in ranks.run(2, gradient_norm, parallel, optimizer):
        assert norm == pytest.approx(wanted, rel=TOLERANCE)


def save(directory: str) -> dict[str, torch.Tensor]:
    policy = build_policy(PIPELINE, optimizer=DISTRIBUTED_OPTIMIZER)
    policy.train(batch(), NLLLoss(), gbs=ROWS)
    policy.save_checkpoint(directory, 1)
    return next_step(policy)


def load(directory: str) -> dict[str, torch.Tensor]:
    policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER, seed=9)
    policy.load_checkpoint(Path(directory) / "step-000001")
    return next_step(policy)


def next_step(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    policy.train(batch(seed=1), NLLLoss(), gbs=ROWS)
    return weights(policy)


def test_moments_of_a_second_bucket_survive_a_checkpoint(ranks, tmp_path):
    """Tied embeddings get a gradient bucket of their own, and the moments behind a bucket's padding were written from
    the wrong offsets, partly as zeros (NVIDIA/Megatron-LM pull requests 5077 and 5898)."""
    wanted = ranks.run(4, save, str(tmp_path))[0]
    error, name = worst_relative_error(ranks.run(1, load, str(tmp_path))[0], wanted)
    assert error <= TOLERANCE, (name, error)
