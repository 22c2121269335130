"""Forward passes over whole batches, without gradients: logprobs, scores and top-k logits of every token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.plan import plan_microbatches, sequence_lengths
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import FusedHead, Runner
from rl_megatron.model.backend import choose_backend
from rl_megatron.model.sharded_model import ShardedModel

_NUMBER = torch.zeros(())  # the value of one token if it is a single number


def build_runner(model: ShardedModel, fused_head: FusedHead | None) -> Runner:
    """Return a runner of the model. It shares the list of model chunks, so `model.release` drops them here too."""
    backend = choose_backend(model.config, model.topology.device)
    # A score head does not compute logits, so it has nothing to fuse.
    return Runner(
        model.model_chunks, model.topology, model.vocab_size, backend, fused_head if model.head == "lm" else None
    )


def on_device(data: BatchedDataDict, device: torch.device) -> BatchedDataDict:
    """Return a copy of the batch with its tensors on `device`.

    The caller's batch keeps its own tensors, even if its class moves tensors in place.
    """
    return copy.copy(data).to(device)


def checked_lengths(model: ModelConfig, data: BatchedDataDict) -> list[int]:
    """Return the length of each sequence.

    Raises:
        ConfigError: A sequence is longer than `model.max_sequence_length`.
        ValueError: `input_lengths` does not fit the batch.
    """
    longest = data["input_ids"].size(1)
    if longest > model.max_sequence_length:
        raise ConfigError(
            f"a sequence has {longest} tokens, but model.max_sequence_length={model.max_sequence_length}; "
            "shorten the sequences (data.too_long=truncate) or raise the limit"
        )
    return sequence_lengths(data)


class Inference:
    """Computes values for every token of a batch. It owns only the cost model that balances microbatches.

    Every method is collective. All ranks pass the same batch and get the same result.
    """

    def __init__(self, model: ShardedModel, runner: Runner):
        self.model, self.runner = model, runner
        self.cost = SequenceCost.of_model(model.config, model.vocab_size)

    def logprobs(self, data: BatchedDataDict, batching: Batching) -> Tensor:
        """Return logprobs [B, S] fp32. Entry t corresponds to token t, and entry 0 is 0."""
        return self._per_token(self.runner.next_token_logprobs, data, batching)

    def values(self, data: BatchedDataDict, batching: Batching) -> Tensor:
        """Return values [B, S] fp32 of a score head. Entry t is the score read before token t, and entry 0 is 0."""

        def before_each_token(microbatches: list[Microbatch]) -> list[Tensor]:
            return [scores[:, :-1] for scores in self.runner.scores(microbatches)]

        return self._per_token(before_each_token, data, batching)

    def scores(self, data: BatchedDataDict, batching: Batching) -> Tensor:
        """Return scores [B] fp32 of a score head, read after each sequence's last token (`input_lengths`)."""
        scores = self._per_token(self.runner.scores, data, batching, first_column=0)
        last = data["input_lengths"][:, None] - 1
        return scores.gather(1, last.to(scores.device))[:, 0]

    def topk_logits(self, data: BatchedDataDict, k: int, batching: Batching) -> tuple[Tensor, Tensor]:
        """Return (logits [B, S, k] fp32, ids [B, S, k] int64), largest first. Entry t is read after token t.

        Raises:
            ValueError: `k` is not between 1 and the vocabulary size.
        """
        if not 1 <= k <= self.model.vocab_size:  # checked here, so that every pipeline stage raises
            raise ValueError(f"k={k} must be at least 1 and at most the vocabulary size, {self.model.vocab_size}")
        read, entry = partial(self.runner.topk_logits, k=k), torch.zeros(k, 2, dtype=torch.int32)
        bits, ids = self._per_token(read, data, batching, first_column=0, entry=entry).unbind(-1)
        return bits.contiguous().view(torch.float32), ids.long()

    def _per_token(
        self,
        read: Callable[[list[Microbatch]], list[Tensor]],
        data: BatchedDataDict,
        batching: Batching,
        first_column: int = 1,
        entry: Tensor = _NUMBER,
    ) -> Tensor:
        """Return the value of every token [B, S, …] on every rank, on the device of `data`.

        Args:
            read: Returns, on the last pipeline stage, the values of this rank's microbatches.
            data: The global batch. Every token is read, whatever its `token_mask` is.
            batching: How the batch is split into microbatches.
            first_column: The token to which the first column of the values from `read` corresponds.
            entry: […] Zeros of the shape of one token's value. They fill entries without a value, for example those
                beyond a sequence's end.
        """
        topology, home = self.model.topology, data["input_ids"].device
        lengths = checked_lengths(self.model.config, data)
        keys = [key for key in ("input_ids", "temperature") if key in data]
        batch = BatchedDataDict({key: data[key] for key in keys})
        batch["sample_mask"] = torch.ones(batch.size)
        batch = batch.to(topology.device)
        width = batch["input_ids"].size(1)
        planned = plan_microbatches(batch, lengths, batching, topology, cost=self.cost)
        entry = entry.to(topology.device)
        whole = planned.spread(read(planned.microbatches), width, first_column, entry)
        if topology.pipeline > 1:
            dist.broadcast(whole, src=topology.last_stage_rank, group=topology.groups.pp)
        if topology.data > 1:
            dist.all_reduce(whole, group=topology.groups.dp)  # one rank computed each sequence, and the others have 0
        past_the_end = (torch.arange(width) >= torch.tensor(lengths)[:, None]).to(home)
        return whole.to(home).masked_fill(past_the_end.view(batch.size, width, *(1 for _ in entry.shape)), 0)
