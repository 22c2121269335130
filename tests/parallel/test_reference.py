"""The reference policy: offloaded to the host between calls, or recorded, it gives the same logprobs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_megatron import log
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.reference import HostWeights, RecordedReference
from rl_megatron.weight_sync.exporter import digest_weights
from tests.full_disk import files_of_at_most
from tests.parallel.layouts import build_policy
from tests.parallel.test_layouts import random_batch

CPU = torch.device("cpu")


def offloaded(parallel: dict) -> tuple[torch.Tensor, torch.Tensor, list[int], bool]:
    """Freeze a reference that is offloaded, and take a step.

    Returns:
        The logprobs at the start, those of the reference after the step, the sizes of its parameters between calls, and
        whether a message said that offloading does nothing on a CPU.
    """
    log.once.messages.clear()
    policy = build_policy(parallel, reference_placement="offload")
    batch = random_batch(6, 14, 2)
    start = policy.get_logprobs(batch)["logprobs"]
    policy.freeze_reference()
    warned = any("train.reference=offload" in message for message in log.once.messages)
    modules = policy.reference.model.model_chunks
    policy.reference.host_weights = HostWeights(modules, CPU)  # as on a GPU; here host and device are the same
    policy.train(batch, NLLLoss(), gbs=6)
    for _ in range(2):
        reference = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    return start, reference, [p.numel() for module in modules for p in module.parameters()], warned


@pytest.mark.parametrize("layout", [(1, {}), (2, {"pipeline": 2})], ids=str)
def test_an_offloaded_reference_gives_the_same_logprobs_and_is_on_the_device_during_calls_only(ranks, layout):
    for start, reference, sizes, warned in ranks.run(layout[0], offloaded, layout[1]):
        assert torch.equal(reference, start) and reference.abs().max() > 0
        assert sizes and not any(sizes)
        assert warned


def recorded(parallel: dict, directory: str, seed: int = 1) -> dict:
    """Record the reference of two batches and read it back.

    Returns:
        The policy's logprobs (`wanted`), the recorded ones (`found`, and `mixed` for a selection of sequences), and the
        sizes of the batches that were computed for the record.
    """
    policy, path = build_policy(parallel, seed=seed), Path(directory) / "reference.safetensors"
    batches = [random_batch(4, 12, 0), random_batch(4, 14, 1)]
    del batches[0]["temperature"]  # which is 1 then
    batches[1]["temperature"] = torch.full((4,), 0.7)
    wanted = [policy.get_logprobs(batch)["logprobs"] for batch in batches]
    computed, get_logprobs = [], policy.get_logprobs
    policy.get_logprobs = lambda batch: computed.append(batch.size) or get_logprobs(batch)
    policy.record_reference(path, batches)
    policy.train(batches[0], NLLLoss(), gbs=4)
    found = [policy.get_reference_policy_logprobs(batch)["reference_logprobs"] for batch in batches]
    mixed = policy.get_reference_policy_logprobs(batches[0].select_indices([3, 1]))["reference_logprobs"]
    at_another_temperature = BatchedDataDict(batches[1] | {"temperature": torch.full((4,), 0.8)})
    for unknown in (random_batch(3, 12, 5), at_another_temperature):
        with pytest.raises(RuntimeError, match="sequence 0 of the batch is not among the 8 recorded"):
            policy.get_reference_policy_logprobs(unknown)
    assert policy.reference is not None
    return {"wanted": wanted, "found": found, "mixed": mixed, "computed": computed}


@pytest.mark.parametrize("layout", [(1, {}), (2, {"tensor": 2})], ids=str)
def test_recorded_logprobs_are_those_of_the_reference(ranks, tmp_path, layout):
    for answer in ranks.run(layout[0], recorded, layout[1], str(tmp_path)):
        for wanted, found in zip(answer["wanted"], answer["found"], strict=True):
            assert torch.equal(found, wanted)
        assert torch.equal(answer["mixed"], answer["wanted"][0][[3, 1]])
        assert answer["computed"] == [4, 4]


def test_a_record_is_reused_in_any_layout_but_only_for_the_same_weights(ranks, tmp_path):
    first = ranks.run(1, recorded, {}, str(tmp_path))[0]
    path = tmp_path / "reference.safetensors"
    for answer in ranks.run(2, recorded, {"tensor": 2}, str(tmp_path)):
        assert answer["computed"] == []
        assert torch.equal(answer["found"][1], first["found"][1])
    others = ranks.run(1, recorded, {}, str(tmp_path), 2)[0]
    assert others["computed"] == [4, 4]
    assert torch.equal(others["found"][0], others["wanted"][0])
    path.write_bytes(path.read_bytes()[:-40])
    assert ranks.run(1, recorded, {}, str(tmp_path), 2)[0]["computed"] == [4, 4]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def record_on_a_full_disk(directory: str) -> tuple[set[str], list[str]]:
    """Record logprobs that do not fit. Return the warnings, and what is left in the directory."""
    record, batch = (
        RecordedReference(Path(directory) / "reference.safetensors", "digest", Ranks.detect()),
        random_batch(4, 12, 0),
    )
    with files_of_at_most(100):
        record.complete([batch], lambda part: part["input_ids"] / 7)
    assert torch.equal(record.logprobs(batch)[0, 0], batch["input_ids"][0, 0] / 7)
    return log.once.messages, os.listdir(directory)


def test_logprobs_that_do_not_fit_are_kept_in_memory(ranks, tmp_path):
    messages, left = ranks.run(1, record_on_a_full_disk, str(tmp_path))[0]
    assert any("cannot be written" in message and "bytes free of" in message for message in messages)
    assert left == []


def bytes_of_a_resume(directory: str, num_sequences: int, width: int) -> int:
    """Return the bytes of the largest message that sends a record of `num_sequences` sequences to the other ranks."""
    path, sent = Path(directory) / "reference.safetensors", []
    batch = random_batch(num_sequences, width, 0)
    record = RecordedReference(path, "digest", Ranks.detect())
    record.complete([batch], lambda part: part["input_ids"] / 7)
    broadcast = dist.broadcast_object_list

    def counted(objects, **options):
        sent.append(len(pickle.dumps(objects)))
        broadcast(objects, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "broadcast_object_list", counted)
        again = RecordedReference(path, "digest", Ranks.detect())
    assert torch.equal(again.logprobs(batch), record.logprobs(batch))
    return max(sent)


def test_a_resume_sends_a_record_once_and_not_once_per_sequence(ranks, tmp_path):
    """If the sequences were views of one tensor, each would be sent with the storage of all."""
    sent = ranks.run(2, bytes_of_a_resume, str(tmp_path), 200, 30)[0]
    assert sent < 2 * (tmp_path / "reference.safetensors").stat().st_size


def sequences_computed(directory: str) -> list[int]:
    """Record overlapping selections of sequences; return the sizes of the batches that were computed."""
    policy, path, computed = build_policy({}), Path(directory) / "reference.safetensors", []
    get_logprobs = policy.get_logprobs
    policy.get_logprobs = lambda batch: computed.append(batch.size) or get_logprobs(batch)
    batch = random_batch(6, 12, 0)
    for sequences in ([0, 1], [1, 2, 0], [2, 1], [5, 3]):
        policy.record_reference(path, [batch.select_indices(sequences)])
    return computed


def test_only_sequences_that_are_not_recorded_yet_are_computed(ranks, tmp_path):
    assert ranks.run(1, sequences_computed, str(tmp_path))[0] == [2, 1, 2]


def models_made(directory: str) -> list[int]:
    """Return how many copies of the model a record makes, and how many there are after `freeze_reference`."""
    policy, made = build_policy({}), []
    frozen_copy = policy.model.frozen_copy
    policy.model.frozen_copy = lambda: made.append(1) or frozen_copy()
    policy.record_reference(Path(directory) / "reference.safetensors", [random_batch(3, 12, 0)])
    recorded_with = len(made)
    policy.freeze_reference()
    return [recorded_with, len(made)]


def test_a_recorded_reference_does_not_copy_the_model(ranks, tmp_path):
    assert ranks.run(1, models_made, str(tmp_path))[0] == [0, 1]


def digests_of_swapped_weights() -> list[str]:
    """Return the digests of a model, with the weights of two layers swapped, and swapped again."""
    policy = build_policy({})
    found = [digest_weights(policy.model)]
    (chunk,) = policy.model.model_chunks
    first, second = [weight for name, weight in chunk.named_parameters() if name.endswith("mlp.linear_fc2.weight")][:2]
    for _ in range(2):
        first.data, second.data = second.data.clone(), first.data.clone()
        found.append(digest_weights(policy.model))
    return found


@pytest.mark.fast
def test_the_digest_of_weights_depends_on_which_tensor_has_them(ranks):
    first, swapped, again = ranks.run(1, digests_of_swapped_weights)[0]
    assert first == again != swapped
