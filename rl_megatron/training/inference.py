"""Forward passes over whole batches, without gradients: logprobs, scores and top-k logits of every token."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.owned_plan import owned_microbatches, plan_owned
from rl_megatron.batching.rank_plan import plan_global_batch, required, sequence_lengths
from rl_megatron.batching.routing import ROUTED_EXPERTS, check_routed_experts
from rl_megatron.batching.sharded import ShardedBatch
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.score_position import score_positions
from rl_megatron.model.backend import choose_backend
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.training.runner import FusedHead, Runner
from rl_megatron.training.token_values import OwnTokenValues, TokenValues

_LENGTH_KEYS = ("input_lengths", "token_mask")
_NUMBER = torch.zeros(())  # the value of one token if it is a single number


def build_runner(model: ShardedModel, fused_head: FusedHead | None) -> Runner:
    """Return a runner of the model. It shares the list of model chunks, so `model.release` drops them here too."""
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


def on_host(data: BatchedDataDict) -> BatchedDataDict:
    """Return a copy of the batch with its tensors on the host, where it is split into microbatches.

    The caller's batch keeps its own tensors, even if its class moves tensors in place.
    """
    return copy.copy(data).to("cpu")


def checked_lengths(model: ShardedModel, data: BatchedDataDict) -> list[int]:
    """Return the length of each sequence of a batch on the host.

    A token that the vocabulary does not have would be no error on ranks that do not embed it.

    Raises:
        ConfigError: A sequence is longer than `model.max_sequence_length`.
        KeyError: The batch has no `input_ids`.
        ValueError: `input_lengths` or `temperature` does not fit the batch, a token is not in the vocabulary, or a
            temperature is not positive and finite.
    """
    lengths = sequence_lengths(data)
    ids = data["input_ids"]
    check_width(model.config, ids.size(1))
    wrong = (ids < 0) | (ids >= model.vocab_size)
    if wrong.any():
        number, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{number}, {position}]={ids[number, position].item()} is not a token of the vocabulary, "
            f"0 … {model.vocab_size - 1}; pad with a token that it has"
        )
    if isinstance(data.get("temperature"), Tensor):
        _check_temperatures(data["temperature"], ids.shape, lengths)
    return lengths


def _check_temperatures(temperature: Tensor, shape: torch.Size, lengths: list[int]) -> None:
    """Check the temperatures of tokens on every rank, because only the last pipeline stage uses them.

    Raises:
        ValueError: The shape does not fit, or the temperature of a token is not positive and finite.
    """
    if temperature.shape not in (torch.Size(), shape[:1], torch.Size((shape[0], 1)), shape):
        raise ValueError(
            f"temperature {tuple(temperature.shape)} must be a number, [B], [B, 1] or [B, S] for "
            f"input_ids {tuple(shape)}"
        )
    per_token = (temperature[:, None] if temperature.dim() == 1 else temperature).expand(shape)
    wrong = ~((per_token > 0) & per_token.isfinite()) & (torch.arange(shape[1]) < torch.tensor(lengths)[:, None])
    wrong[:, 0] = False  # nobody predicts the first token
    if wrong.any():
        number, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"the temperature of token [{number}, {position}] is {per_token[number, position].item()}, and must be "
            "positive and finite; greedy decoding does not have logprobs"
        )


def check_width(model: ModelConfig, width: int) -> None:
    """Check that the model takes sequences of so many tokens.

    Raises:
        ConfigError: They are longer than `model.max_sequence_length`.
    """
    if width > model.max_sequence_length:
        raise ConfigError(
            f"a sequence has {width} tokens, but model.max_sequence_length={model.max_sequence_length}; "
            "shorten the sequences (data.too_long=truncate) or raise the limit"
        )


def replayable(model: ShardedModel, data: BatchedDataDict) -> BatchedDataDict:
    """Return the batch with its recorded experts if this model replays them, and without them otherwise.

    A model with a score head (a critic) has routers of its own, and a dense model has none.

    Raises:
        ConfigError: The recorded experts do not fit the batch and the model.
    """
    if ROUTED_EXPERTS not in data:
        return data
    if model.head == "lm" and model.config.num_experts is not None:
        if data.size:  # a rank may own none
            check_routed_experts(data, model.config)
        return data
    rest = copy.copy(data)
    del rest[ROUTED_EXPERTS]
    return rest


class Inference:
    """Computes values for every token of a batch. It owns only the cost model that balances microbatches.

    Every method is collective. All ranks pass the same batch and get the same result. Of a sharded batch, ranks pass
    their own sequences, and get the values of these.
    """

    def __init__(self, model: ShardedModel, runner: Runner):
        self.model, self.runner = model, runner
        self.cost = SequenceCost.of_model(model.config, model.vocab_size)

    def logprobs(
        self, data: BatchedDataDict | ShardedBatch, batching: Batching, replay_routing: bool = False
    ) -> Tensor:
        """Return logprobs [B, S] fp32. Entry t corresponds to token t, and entry 0 is 0.

        Args:
            data: The global batch.
            batching: How the batch is split into microbatches.
            replay_routing: Route tokens to the experts of the batch's `routed_experts`, if it has them.
        """
        keys = ("input_ids", "temperature", ROUTED_EXPERTS) if replay_routing else ("input_ids", "temperature")
        return self._per_token(self.runner.next_token_logprobs, data, batching, keys=keys)

    def values(self, data: BatchedDataDict | ShardedBatch, batching: Batching) -> Tensor:
        """Return values [B, S] fp32 of a score head. Entry t is the score read before token t, and entry 0 is 0."""

        def before_each_token(microbatches: list[Microbatch]) -> list[Tensor]:
            return [scores[:, :-1] for scores in self.runner.scores(microbatches)]

        return self._per_token(before_each_token, data, batching)

    def scores(self, data: BatchedDataDict | ShardedBatch, batching: Batching) -> Tensor:
        """Return scores [B] fp32 of a score head, read at `score_positions`."""
        scores = self._per_token(self.runner.scores, data, batching, first_column=0)
        return scores.gather(1, score_positions(data).to(scores.device)[:, None])[:, 0]

    def topk_logits(self, data: BatchedDataDict | ShardedBatch, k: int, batching: Batching) -> tuple[Tensor, Tensor]:
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
        data: BatchedDataDict | ShardedBatch,
        batching: Batching,
        first_column: int = 1,
        entry: Tensor = _NUMBER,
        keys: Sequence[str] = ("input_ids", "temperature"),
    ) -> Tensor:
        """Return the value of every token [B, S, …] on every rank, on the device of `data`.

        Args:
            read: Returns, on the last pipeline stage, the values of this rank's microbatches.
            data: The global batch. Every token is read, whatever its `token_mask` is.
            batching: How the batch is split into microbatches.
            first_column: The token to which the first column of the values from `read` corresponds.
            entry: […] Zeros of the shape and dtype of one token's value. They fill entries without a value, for example
                those beyond a sequence's end.
            keys: The keys of `data` that the model reads.
        """
        if isinstance(data, ShardedBatch):
            return self._of_own_tokens(read, data, batching, first_column, entry, keys)
        home = required(data, "input_ids").device
        batch = on_host(BatchedDataDict({key: data[key] for key in (*keys, *_LENGTH_KEYS) if key in data}))
        lengths = checked_lengths(self.model, batch)
        for key in _LENGTH_KEYS:
            batch.pop(key, None)
        batch["sample_mask"] = torch.ones(batch.size)
        batch = replayable(self.model, batch)
        planned = plan_global_batch(batch, lengths, batching, self.model.topology, cost=self.cost)
        values = TokenValues(planned, lengths, first_column, self.model.topology, self._hidden_bytes())
        return values.on_every_host(read(planned.microbatches(self.model.topology.data_rank)), entry).to(home)

    def _of_own_tokens(
        self, read: Callable[[list[Microbatch]], list[Tensor]], data: ShardedBatch, batching: Batching,
        first_column: int, entry: Tensor, keys: Sequence[str],
    ) -> Tensor:  # fmt: skip
        """Return the value of every token [n, S, …] of this rank's sequences, on the host."""
        check_width(self.model.config, data.width)
        topology = self.model.topology
        own = BatchedDataDict({key: data[key] for key in keys if key in data})
        own["sample_mask"] = torch.ones(own.size)
        if ROUTED_EXPERTS in own:
            own = topology.ranks.all_or_none(lambda: replayable(self.model, own))
        batch = replace(data, own=own)
        step = plan_owned(batch, 0, batch.size, batching, topology, cost=self.cost)
        values = OwnTokenValues(step.shapes.sequences, batch, first_column, topology)
        return values.on_host(read(owned_microbatches(batch, step).microbatches), entry)

    def _hidden_bytes(self) -> int:
        """Return the bytes of the hidden state of one token."""
        return self.model.config.hidden_size * (2 if self.model.precision == "bf16" else 4)
