"""Forward passes over whole batches, without gradients: logprobs, scores and top-k logits of every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.routing import ROUTED_EXPERTS, check_routed_experts
from rl_megatron.batching.step_microbatches import form_microbatches, plan_step
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.data.batch import BatchedDataDict, score_positions
from rl_megatron.log import once
from rl_megatron.model.backend import choose_backend
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.training.runner import FusedHead, Runner
from rl_megatron.training.token_values import TokenValues

_NUMBER = torch.zeros(())  # the default `entry`: one token's value is a single number


def build_runner(model: ShardedModel, fused_head: FusedHead | None) -> Runner:
    """Return a runner that shares the model's list of model chunks, which `model.release` empties."""
    backend = choose_backend(model.config, model.topology, model.precision)
    # A score head does not compute logits, so it has nothing to fuse.
    return Runner(
        model.model_chunks,
        model.topology,
        model.vocab_size,
        backend,
        fused_head if model.head == "lm" else None,
        has_dropout=model.lora is not None and model.lora.lora_dropout > 0,
    )


def build_whole_batch(model: ShardedModel, data: Mapping[str, object]) -> Batch:
    """Convert a user's dictionary, the same on every rank, to a batch on the host, where microbatches are formed.

    The caller's dictionary is unchanged. Tokens and temperatures are checked here on every rank, because only the first
    pipeline stage embeds tokens, and only the last one uses temperatures.

    Raises:
        KeyError: The dictionary has no `input_ids`.
        ValueError: `input_lengths` or `temperature` does not fit the batch, a token is not in the vocabulary, or a
            temperature is not positive and finite.
    """
    batch = Batch.from_whole(BatchedDataDict(data).to("cpu"))
    ids = batch["input_ids"]
    check_width(model.config, batch.width)
    wrong = (ids < 0) | (ids >= model.vocab_size)
    if wrong.any():
        number, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{number}, {position}]={ids[number, position].item()} is not a token of the vocabulary, "
            f"0 … {model.vocab_size - 1}; pad with a token of the vocabulary"
        )
    if isinstance(batch.get("temperature"), Tensor):
        _check_temperatures(batch["temperature"], ids.shape, batch.lengths)
    return batch


def _check_temperatures(temperature: Tensor, shape: torch.Size, lengths: Tensor) -> None:
    if temperature.shape not in (torch.Size(), shape[:1], torch.Size((shape[0], 1)), shape):
        raise ValueError(
            f"temperature {tuple(temperature.shape)} must be a number, [B], [B, 1] or [B, S] for "
            f"input_ids {tuple(shape)}"
        )
    per_token = (temperature[:, None] if temperature.dim() == 1 else temperature).expand(shape)
    wrong = ~((per_token > 0) & per_token.isfinite()) & (torch.arange(shape[1]) < lengths[:, None])
    wrong[:, 0] = False  # the first token is not predicted
    if wrong.any():
        number, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"the temperature of token [{number}, {position}] is {per_token[number, position].item()}, but must be "
            "positive and finite; logprobs are not defined for greedy decoding"
        )


def check_width(model: ModelConfig, width: int) -> None:
    """Raise ConfigError if sequences of `width` tokens are longer than `model.max_sequence_length`."""
    if width > model.max_sequence_length:
        raise ConfigError(
            f"a sequence has {width} tokens, but model.max_sequence_length={model.max_sequence_length}; "
            "shorten the sequences (data.too_long=truncate) or raise the limit"
        )


def prepare(model: ShardedModel, batch: Batch) -> Batch:
    """Check a batch and return it, but without its recorded experts if the model cannot replay them. Collective.

    A model with a score head (a critic) has other routers than those that were recorded, and a dense model has none.
    """
    check_width(model.config, batch.width)
    if ROUTED_EXPERTS not in batch:
        return batch
    if model.head == "lm" and model.config.num_experts is not None:
        # A rank may own no sequences.
        batch.all_ranks.all_or_none(lambda: check_routed_experts(batch, model.config) if len(batch.numbers) else None)
        return batch
    return replace(batch, local=BatchedDataDict({key: batch[key] for key in batch if key != ROUTED_EXPERTS}))


def allow_sharing(batching: Batching, backend: str) -> Batching:
    """Return the batching, without shared prefixes if these layers cannot share them."""
    if not batching.share_prefixes or backend == "portable":
        return batching
    once("Transformer Engine's attention cannot share the tokens of common prefixes: each sequence has its own")
    return replace(batching, share_prefixes=False)


class Inference:
    """The forward passes of a model over batches. It owns only the cost model that balances microbatches.

    Every method is collective, and returns values for this rank's sequences of the batch.
    """

    def __init__(self, model: ShardedModel, runner: Runner):
        self.model, self.runner = model, runner
        self.cost = SequenceCost.from_model(model.config, model.vocab_size)

    def logprobs(self, batch: Batch, batching: Batching, replay_routing: bool = False) -> Tensor:
        """Return logprobs [B, S] fp32. Entry t corresponds to token t, and entry 0 is 0.

        With `replay_routing`, tokens are routed to the experts of the batch's `routed_experts`, if it has them.
        """
        keys = ("input_ids", "temperature", ROUTED_EXPERTS) if replay_routing else ("input_ids", "temperature")
        return self._read_tokens(self.runner.next_token_logprobs, batch, batching, keys=keys)

    def values(self, batch: Batch, batching: Batching) -> Tensor:
        """Return values [B, S] fp32 of a score head. Entry t is the score read before token t, and entry 0 is 0."""

        def read_before_each_token(microbatches: list[Microbatch]) -> list[Tensor]:
            return [scores[:, :-1] for scores in self.runner.scores(microbatches)]

        return self._read_tokens(read_before_each_token, batch, batching)

    def scores(self, batch: Batch, batching: Batching) -> Tensor:
        """Return scores [B] fp32 of a score head, read at `score_positions`."""
        scores = self._read_tokens(self.runner.scores, batch, batching, first_column=0)
        return scores.gather(1, score_positions(batch).to(scores.device)[:, None])[:, 0]

    def topk_logits(self, batch: Batch, k: int, batching: Batching) -> tuple[Tensor, Tensor]:
        """Return (logits [B, S, k] fp32, ids [B, S, k] int64), largest first. Entry t is read after token t."""
        if not 1 <= k <= self.model.vocab_size:  # checked here, so that every pipeline stage raises
            raise ValueError(f"k={k} must be at least 1 and at most the vocabulary size, {self.model.vocab_size}")
        read, entry = partial(self.runner.topk_logits, k=k), torch.zeros(k, 2, dtype=torch.int32)
        bits, ids = self._read_tokens(read, batch, batching, first_column=0, entry=entry).unbind(-1)
        return bits.contiguous().view(torch.float32), ids.long()

    def _read_tokens(
        self,
        read: Callable[[list[Microbatch]], list[Tensor]],
        batch: Batch,
        batching: Batching,
        first_column: int = 1,
        entry: Tensor = _NUMBER,
        keys: Sequence[str] = ("input_ids", "temperature"),
    ) -> Tensor:
        """Return the value of every token [n, S, …] of this rank's sequences, on the host.

        Args:
            read: Returns, on the last pipeline stage, the values of this rank's microbatches.
            batch: The batch. Every token is read, whatever its `token_mask` is.
            batching: How the batch is split into microbatches.
            first_column: The index of the token to which the first column of `read`'s values corresponds.
            entry: […] Zeros of the shape and dtype of one token's value. They fill entries without a value, for example
                those beyond a sequence's end.
            keys: The keys of the batch that the model reads.
        """
        local = BatchedDataDict({key: batch[key] for key in keys if key in batch})
        local["sample_mask"] = torch.ones(len(batch.numbers))
        batch = prepare(self.model, replace(batch, local=local))
        topology = self.model.topology
        batching = allow_sharing(batching, self.runner.backend)
        step = plan_step(batch, 0, batch.size, batching, topology, topology.data_rank, cost=self.cost)
        hidden_bytes = self.model.config.hidden_size * (2 if self.model.precision == "bf16" else 4)
        values = TokenValues(batch, step, first_column, topology, hidden_bytes)
        return values.gather(read(form_microbatches(batch, step, step.local)), entry)
