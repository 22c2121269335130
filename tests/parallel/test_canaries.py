"""Known silent bugs of parallel training (wrong numbers, no error): tests that a policy does not have them.

Each test is about one bug. Its name is the symptom that does not occur; its docstring describes the bug and cites the
thread that reports it. A test fails if a change here or in megatron-core brings its bug back. It compares the layout
with one process, or the ranks with each other.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from rl_megatron.model.build import unwrap
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.trainer import GradientNorms
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
NUM_SEQUENCES, LENGTH = 6, 16


def batch(num_sequences: int = NUM_SEQUENCES, length: int = LENGTH, seed: int = 0) -> BatchedDataDict:
    """Return random sequences of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (num_sequences,), generator=generator)
    return BatchedDataDict(
        input_ids=torch.randint(0, VOCAB_SIZE, (num_sequences, length), generator=generator),
        input_lengths=lengths,
        token_mask=(torch.arange(length) < lengths[:, None]).float(),
        sample_mask=torch.ones(num_sequences),
    )


def first_tokens_only(length: int = LENGTH) -> BatchedDataDict:
    """Return a batch whose valid tokens are all in the first quarter, which context-parallel rank 0 of 2 holds."""
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
    return ranks.run(1, loss_and_gradients, {}, batch(), NUM_SEQUENCES)[0]


# --- tensor and sequence parallelism ---


def gradients_of_replicated_norms(parallel: dict) -> dict[str, torch.Tensor]:
    """Return this rank's gradient of each norm; every tensor-parallel rank holds all norms."""
    policy = build_policy(parallel)
    policy.accumulate_gradients(batch(), NLLLoss())
    named = unwrap(policy.model.model_chunks[0]).named_parameters()
    return {name: parameter.main_grad.clone() for name, parameter in named if "norm" in name}


@pytest.fixture(scope="module")
def norms_of_one_process(ranks):
    return ranks.run(1, gradients_of_replicated_norms, {})[0]


def test_norms_do_not_learn_from_one_ranks_part_of_the_sequence(ranks, norms_of_one_process):
    """With sequence parallelism each rank's norms see a part of the tokens.

    The bug: a norm's gradient was that of the rank's part only (NVIDIA/Megatron-LM issue 1446).
    """
    for found in ranks.run(2, gradients_of_replicated_norms, SEQUENCE):
        error, name = worst_relative_error(found, norms_of_one_process)
        assert error <= TOLERANCE, (name, error)


def test_query_and_key_norms_do_not_learn_from_one_ranks_heads(ranks, norms_of_one_process):
    """The norms of queries and keys are replicated, but each rank applies them to its own heads only.

    The bug: without sequence parallelism, the ranks' partial gradients were never summed (NVIDIA/Megatron-LM issues 816
    and 7452, finding 11).
    """
    shared = {name: gradient for name, gradient in norms_of_one_process.items() if "q_layernorm" in name}
    assert len(shared) == MODEL.num_layers
    for found in ranks.run(2, gradients_of_replicated_norms, TENSOR):
        error, name = worst_relative_error(found, norms_of_one_process)
        assert error <= TOLERANCE, (name, error)


def loss_and_logprobs(parallel: dict) -> tuple[float, torch.Tensor]:
    policy = build_policy(parallel)
    return policy.train(batch(), NLLLoss(), eval_mode=True)["loss"], policy.get_logprobs(batch())["logprobs"]


def test_loss_is_not_off_by_the_logarithm_of_the_tensor_degree(ranks):
    """The loss of a vocabulary shard must get the logits of that shard.

    The bug: it got whole logits, so that each token of the vocabulary counted once per rank and the loss was
    log(tensor) too high (NVIDIA/Megatron-LM issue 7452, finding 2).
    """
    wanted_loss, wanted = ranks.reference(loss_and_logprobs, {})
    for loss, found in ranks.run(2, loss_and_logprobs, TENSOR):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def reductions_over_tensor_ranks(parallel: dict) -> tuple[int, int]:
    """Count the tensors that a training step sums over the tensor-parallel ranks.

    Returns:
        How many tensors there are, and how many of them are not contiguous.
    """
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
    """All tensors that are summed over tensor-parallel ranks are contiguous.

    The bug: a tensor that is not contiguous was reduced in a copy, and the unreduced tensor was returned
    (NVIDIA/Megatron-LM issue 5337).
    """
    for reductions, not_contiguous in ranks.run(2, reductions_over_tensor_ranks, TENSOR):
        assert reductions > 0 and not_contiguous == 0


# --- microbatches and context parallelism ---


@pytest.mark.parametrize("mbs", [1, 4])
def test_gradient_does_not_shrink_with_the_number_of_microbatches(ranks, one_process, mbs):
    """The losses are already normalised over the global batch.

    The bug: the pipeline schedule also divided the loss by the number of microbatches (areal-project/AReaL pull request
    1273).
    """
    assert_equal(ranks.run(1, loss_and_gradients, {}, batch(), mbs)[0], one_process)


def test_context_parallelism_does_not_multiply_the_gradient(ranks, one_process):
    """The gradient with context parallelism equals that of one process.

    The bugs: the pipeline schedule multiplied the loss by the context degree, because it expected a data-parallel
    average to divide by it (NVIDIA/Megatron-LM issue 673); the gradient of attention was wrong too (issue 1464).
    """
    assert_equal(ranks.run(2, loss_and_gradients, CONTEXT, batch(), NUM_SEQUENCES)[0], one_process)


def test_a_context_parallel_rank_without_a_valid_token_changes_nothing(ranks):
    """All gradients are finite if a rank's tokens are all masked.

    The bug: such a rank divided zero by zero, and every rank's gradient became NaN (NVIDIA/Megatron-LM issue 1764).
    """
    data = first_tokens_only()
    wanted = ranks.run(1, loss_and_gradients, {}, data, NUM_SEQUENCES)[0]
    found = ranks.run(2, loss_and_gradients, CONTEXT, data, NUM_SEQUENCES)[0]
    assert all(gradient.isfinite().all() for gradient in found[1].values())
    assert_equal(found, wanted)


def test_tokens_keep_their_positions_under_context_parallelism(ranks):
    """RoPE rotates each rank's two CP slices by their positions in the whole sequence.

    The bug: it used the positions within the rank's part (NVIDIA/Megatron-LM issue 560). Wrong positions change the
    logprobs on both sides of every cut.
    """
    _, wanted = ranks.reference(loss_and_logprobs, {})
    for _, found in ranks.run(2, loss_and_logprobs, CONTEXT):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


# --- pipeline parallelism ---


def layers_built(parallel: dict, num_layers: int) -> list[str]:
    policy = build_policy(parallel, model=dataclasses.replace(MODEL, num_layers=num_layers))
    layers = [layer for model_chunk in policy.model.model_chunks for layer in unwrap(model_chunk).decoder.layers]
    names = [layer.layer_number for layer in layers]
    forwards = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: forwards.append(layer.layer_number))
    policy.get_logprobs(batch(num_sequences=2), micro_batch_size=2)
    assert set(forwards) == set(names), (forwards, names)
    return names


@pytest.mark.parametrize("parallel, num_layers", [(PIPELINE, 6), (INTERLEAVED, 8)], ids=["stages", "interleaved"])
def test_no_layer_is_dropped_between_stages(ranks, parallel, num_layers):
    """The stages together build every layer.

    The bug: a division that rounds down built 28 of 30 layers on 4 stages (NVIDIA/Megatron-LM issues 1304, 468, 2718).
    """
    built = [number for rank in ranks.run(2, layers_built, parallel, num_layers) for number in rank]
    assert sorted(built) == list(range(1, num_layers + 1))


def refusal(parallel: dict, num_layers: int) -> str:
    with pytest.raises(ConfigError) as error:
        build_policy(parallel, model=dataclasses.replace(MODEL, num_layers=num_layers))
    return str(error.value)


def test_layers_that_do_not_divide_over_model_chunks_are_refused(ranks):
    """10 layers do not divide over 2 stages of 2 model chunks.

    The bug: only 8 of the layers were trained (NVIDIA/Megatron-LM issue 468).
    """
    assert "model.num_layers=10" in ranks.run(2, refusal, INTERLEAVED, 10)[0]


def test_two_interleaved_stages_do_not_swap_activations_and_gradients(ranks, one_process):
    """With two stages, the next and the previous rank are the same rank.

    The bug: batched sends left in another order than the receives expected, so that activations arrived as gradients
    (NVIDIA/Megatron-LM issue 1450, pull request 7177).
    """
    assert_equal(ranks.run(2, loss_and_gradients, INTERLEAVED, batch(), 1)[0], one_process)


def test_padding_microbatches_of_the_interleaved_schedule_change_nothing(ranks, one_process):
    """3 microbatches are padded to 4, and the fourth does not change the loss or the gradient.

    The interleaved schedule needs a multiple of the pipeline degree (volcengine/verl issue 6176).
    """
    assert_equal(ranks.run(2, loss_and_gradients, INTERLEAVED, batch(), 2)[0], one_process)


def tied_weights(parallel: dict, optimizer: OptimizerConfig) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Take two steps; return this rank's copy of the tied embedding, and all whole weights on rank 0."""
    policy = build_policy(parallel, optimizer=optimizer)
    for seed in range(2):
        policy.train(batch(seed=seed), NLLLoss(), gbs=NUM_SEQUENCES, mbs=3)
    model = unwrap(policy.model.model_chunks[-1 if policy.topology.is_last_stage else 0])
    return model.shared_embedding_or_output_weight().detach().clone(), weights(policy)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, DISTRIBUTED_OPTIMIZER], ids=["plain", "distributed"])
def test_tied_embeddings_stay_tied(ranks, optimizer):
    """The first and the last stage each hold a copy of a tied embedding.

    The bug: the copies' gradients were added after they had been reduce-scattered. Different parts of them were added,
    and the copies became different (NVIDIA/Megatron-LM issues 844 and 656).
    """
    _, wanted = ranks.reference(tied_weights, {}, OPTIMIZER)
    found = ranks.run(4, tied_weights, PIPELINE, optimizer)
    for embedding, _ in found:
        assert torch.equal(embedding, found[0][0])
    error, name = worst_relative_error(found[0][1], wanted)
    assert error <= TOLERANCE, (name, error)


@pytest.mark.parametrize("parallel", [SEQUENCE, PIPELINE], ids=["sequence", "pipeline"])
def test_recomputed_activations_give_the_gradient_of_stored_ones(ranks, one_process, parallel):
    """Recomputation repeats a layer's collectives in the backward pass.

    The bug: in a prediction module it repeated them over the wrong ranks, and thus mixed in other ranks' data
    (NVIDIA/Megatron-LM issue 7452, finding 4).
    """
    assert_equal(ranks.run(2, loss_and_gradients, parallel, batch(), 3, "full")[0], one_process)


# --- the optimizer ---


def gradient_norms(parallel: dict, optimizer: OptimizerConfig) -> tuple[float, float]:
    """Return the gradient norm that clipping uses, and the one that is reported."""
    policy = build_policy(parallel, optimizer=optimizer)
    policy.accumulate_gradients(batch(), NLLLoss())
    policy.optimizer.prepare_grads()
    reported = GradientNorms(policy.optimizer, policy.model.model_chunks).compute()
    return float(policy.optimizer.get_grad_norm()), reported["grad_norm"]


@pytest.mark.parametrize("optimizer", [OPTIMIZER, DISTRIBUTED_OPTIMIZER], ids=["plain", "distributed"])
@pytest.mark.parametrize("parallel", [SEQUENCE, INTERLEAVED, CONTEXT], ids=["sequence", "interleaved", "context"])
def test_gradient_norm_counts_every_parameter_once(ranks, one_process, parallel, optimizer):
    """Clipping uses the norm of all gradients, whichever ranks hold them.

    The bugs: a shard that was not marked as a shard counted on the first rank only, and a copy that was marked as a
    shard counted on every rank (NVIDIA/Megatron-LM pull requests 5916 and 7530, issue 7452 finding 8).
    """
    wanted = torch.stack([gradient.norm() for gradient in one_process[1].values()]).norm().item()
    for norms in ranks.run(2, gradient_norms, parallel, optimizer):
        assert norms == pytest.approx((wanted, wanted), rel=TOLERANCE)


def save(directory: str) -> dict[str, torch.Tensor]:
    policy = build_policy(PIPELINE, optimizer=DISTRIBUTED_OPTIMIZER)
    policy.train(batch(), NLLLoss(), gbs=NUM_SEQUENCES)
    policy.save_checkpoint(directory, 1)
    return next_step(policy)


def load(directory: str) -> dict[str, torch.Tensor]:
    policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER, seed=9)
    policy.load_checkpoint(Path(directory) / "step-000001")
    return next_step(policy)


def next_step(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    policy.train(batch(seed=1), NLLLoss(), gbs=NUM_SEQUENCES)
    return weights(policy)


def test_moments_of_a_second_bucket_survive_a_checkpoint(ranks, tmp_path):
    """Tied embeddings have a gradient bucket of their own, so that the model has two buckets.

    The bug: Adam's moments after a bucket's padding were saved from wrong offsets, some of them as zeros
    (NVIDIA/Megatron-LM pull requests 5077 and 5898).
    """
    wanted = ranks.run(4, save, str(tmp_path))[0]
    error, name = worst_relative_error(ranks.run(1, load, str(tmp_path))[0], wanted)
    assert error <= TOLERANCE, (name, error)
