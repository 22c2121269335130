"""The base classes of losses: formulas over streams (per-token tensors) that are read from a model's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.logprobs import DeferredLogits, Sharding, next_token_stats
from rl_megatron.losses.calling import Call, as_numbers, bind, refuse_nan
from rl_megatron.losses.contract import Count, CountOfSequences, LossInputType, LossType, Reduction
from rl_megatron.losses.streams import TokenMask, TokenStreams, require_integers


class Loss(ABC):
    """A loss: a formula, `evaluate`, over the streams that `read_output` reads from a model's output.

    A mean is a sum divided by a count over the global batch. The losses of a batch's parts therefore add up to the
    batch's loss, and their gradients to its gradient. A loss can be called in two forms: see `__call__`.

    Attributes:
        loss_type: What the loss averages over.
        input_type: What the loss needs from the model.
        reads: "logprobs" if `read_output` passes the output only to `next_token_stats`, and so accepts `DeferredLogits`
            too; "logits" if it needs whole logits or scores. Subclasses that override `read_output` without setting
            `reads` get "logits".
        output_name: The keyword of the model's output in a call.
        input_names: The keywords that `read_output` always returns for `evaluate`; () if it returns only `output_name`.
        further_positional: Keywords of `evaluate` that a call also accepts by position, after all others.
        output_keys: Required keys that only `read_output` reads, such as a teacher's logits.
        group_size: The number of consecutive sequences that must stay in one microbatch: 2 for preference pairs.
        next_token_keys: Keys of [B, S] streams in data whose entry t corresponds to token t+1.
    """

    loss_type: LossType
    input_type: LossInputType
    reads: Literal["logprobs", "logits"] = "logits"
    output_name: str = "next_token_logits"
    input_names: tuple[str, ...] = ()
    further_positional: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    group_size: int = 1
    next_token_keys: frozenset[str] = frozenset()

    def __init_subclass__(cls, **keywords: object) -> None:
        """Set `reads` to "logits" in a class that overrides `read_output` and does not declare what it reads."""
        super().__init_subclass__(**keywords)
        reader = next(owner for owner in cls.__mro__ if {"read_output", "reads"} & vars(owner).keys())
        if "reads" not in vars(reader):
            cls.reads = "logits"

    @property
    @abstractmethod
    def metric_reductions(self) -> Mapping[str, Reduction]:
        """Return every metric that this instance can report, with the reduction that combines its parts.

        The mapping does not depend on data, so that a rank without data can join the reduction. If an optional input is
        missing, the metrics that need it are missing too, and `Reduction.identity` replaces them.
        """

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Return the keys that this instance needs in the batch."""
        return ("token_mask", "sample_mask", *self.output_keys)

    @property
    def on_policy_keys(self) -> frozenset[str]:
        """Return the keys that this instance replaces with the model's own detached output if the batch lacks them.

        This is correct only for the first update after the completions were sampled.
        """
        return frozenset()

    @property
    def reads_on_policy_keys(self) -> bool:
        """Return whether the result would change if the values of `on_policy_keys` were not the model's own output."""
        return bool(self.on_policy_keys)

    @property
    def global_counts(self) -> Mapping[str, CountOfSequences]:
        """Return further counts over the global batch: a mapping of keys to functions that count per sequence.

        `MegatronPolicy` sums the counts over the sequences of an optimizer step on all ranks. It adds the sum to the
        batch under the key, repeated per sequence, unless the batch already has the key.
        """
        return {}

    @property
    def display_name(self) -> str:
        """Return the name of this loss for messages."""
        return type(self).__name__

    @property
    def has_own_call(self) -> bool:
        """Return whether a subclass overrides `__call__`, which may then do more than `evaluate` does."""
        return type(self).__call__ is not Loss.__call__

    @abstractmethod
    def read_output(self, output: Any, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
        """Return the keyword arguments of `evaluate` that come from the model's output.

        They are streams of the whole batch, and every rank returns the same ones, however the output is sharded. Masked
        tokens are not evaluated.

        Args:
            output: The model's output on this rank.
            data: The whole batch, not sharded.
            sharding: How the output is distributed over ranks, and whether it is packed.
        """

    @abstractmethod
    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        *streams: Any,
        **keywords: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this batch's share of the global loss and of each metric, as tensors, without waiting for the device.

        A NaN loss is returned, not raised: the caller must inform the other ranks before any rank may raise.

        Shapes: streams of data are [B, S] and aligned with input_ids (but see `next_token_keys`). Next-token streams
        are [B, S-1], and their entry t corresponds to token t+1. Masked positions may hold any value, including NaN.

        Args:
            data: The batch.
            global_valid_seqs: The number of sequences that count in the global batch.
            global_valid_toks: The number of tokens that count in the global batch.
            *streams: The streams that `read_output` returns; subclasses list them by name.
            **keywords: The same streams by name, and options of the loss.

        Raises:
            KeyError: A key is missing. The message names the key and the loss.
            ValueError: Shapes do not fit. The message names both shapes.
            TypeError: A dtype does not fit. The message names the key and the dtype.
        """

    def __call__(self, *args: Any, **keywords: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and its metrics as Python numbers. Both forms of call run `evaluate`.

        Form 1: (output, data, global_valid_seqs, global_valid_toks, vocab_parallel_rank=None,
        vocab_parallel_group=None, context_parallel_group=None, *, valid_vocab_size=None, cu_seqlens=None,
        cu_seqlens_padded=None). The keyword of the model's output is `output_name`. With a context_parallel_group the
        output is this rank's zigzag slice, and with cu_seqlens it is packed (see `Sharding`); data stays whole. Logits
        are divided by data["temperature"] (a number, [B] or [B, S]) if the batch has it. Ids from valid_vocab_size on
        are padding.

        Form 2: (data, global_valid_seqs, global_valid_toks, **streams) with the keywords `input_names`, such as
        next_token_logprobs [B, S-1].

        In both forms, other keywords go to `evaluate`. In form 1, backward overwrites the logits with their gradient
        unless they are a leaf: see `vocab_parallel_logprobs`. A second loss on the same logits needs a clone of them.

        Raises:
            NaNLoss: The loss is NaN because an input is NaN or infinite at a token or sample that counts. The message
                names the input and the position. `NaNLoss` is a ValueError.
            ValueError: The shapes do not fit. Other errors of `evaluate` are raised as well.
        """
        call = self.prepare(bind(self, args, keywords))
        keywords = dict(call.keywords)
        if call.output is not None:
            keywords |= self.read_output(call.output, call.data, call.sharding)
        loss, metrics = self.evaluate(call.data, call.global_valid_seqs, call.global_valid_toks, **keywords)
        numbers = as_numbers(metrics)
        refuse_nan(self.display_name, loss, numbers, call.data, keywords, self.required_keys, self.next_token_keys)
        return loss, numbers

    def prepare(self, call: Call) -> Call:
        """Return the call that `__call__` runs. A loss that has further forms of call overrides this method."""
        return call

    def name_of(self, tensor: Tensor) -> str:
        """Return the keyword that a tensor stands for as the first positional argument."""
        return self.output_name

    def streams(self, data: Mapping[str, object], like: Tensor) -> TokenStreams:
        """Check that data has the keys that `evaluate` reads, and return data's streams on the device of `like`.

        Their dtype is that of `like`, but at least fp32.
        """
        keys = tuple(key for key in self.required_keys if key not in self.output_keys)
        return TokenStreams(data, like, self.display_name, keys, self.next_token_keys)

    def mask(self, data: Mapping[str, object]) -> TokenMask:
        """Return the mask of the tokens in data that count."""
        return TokenMask.from_batch(data, self.display_name)


class LogprobLoss(Loss):
    """A loss over next-token logprobs: `evaluate(…, next_token_logprobs, next_token_entropy=None)`, each [B, S-1].

    In form 1 of a call (see `Loss.__call__`), next_token_logits is [B, S, V/tp], or [B, S/cp, V/tp] with a
    context_parallel_group.
    """

    input_type = LossInputType.LOGPROB
    reads = "logprobs"
    output_name = "next_token_logits"
    input_names = ("next_token_logprobs",)

    def name_of(self, tensor: Tensor) -> str:
        """Return the keyword that a first positional tensor stands for: logprobs have 2 dimensions, and logits 3."""
        return self.input_names[0] if tensor.dim() == 2 else self.output_name

    @property
    def needs_entropy(self) -> bool:
        """Return whether `evaluate` needs `next_token_entropy`, which is computed in the same pass over the logits."""
        return False

    def read_output(
        self, output: Tensor | DeferredLogits, data: Mapping[str, Any], sharding: Sharding
    ) -> dict[str, Tensor]:
        """Return next_token_logprobs, and next_token_entropy if this loss needs it."""
        stats = next_token_stats(
            output,
            require_integers(data, "input_ids", self.display_name).to(output.device),
            sharding,
            temperature=data.get("temperature", 1.0),
            entropy=self.needs_entropy,
            mask=self.mask(data).including_first.to(output.device),
            most_counted=sharding.most_counted,
        )
        streams = {"next_token_logprobs": stats.logprobs}
        return streams | ({} if stats.entropy is None else {"next_token_entropy": stats.entropy})


class ScoreLoss(Loss):
    """A loss over one score per token: `evaluate(…, next_token_scores)`, [B, S-1].

    Entry t is the score head's output at token t, after the prefix that ends with token t. In form 1 of a call (see
    `Loss.__call__`), scores is [B, S] or [B, S, 1], or [B, S/cp(, 1)] with a context_parallel_group. A subclass may
    rename both keywords.
    """

    input_type = LossInputType.LOGIT
    output_name = "scores"
    input_names = ("next_token_scores",)

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        """Return the scores of the whole batch without those of the last position."""
        return {self.input_names[0]: token_scores(output, data, sharding, self)[:, :-1]}


def token_scores(
    output: Shaped[Tensor, "rows length *one"], data: Mapping[str, Any], sharding: Sharding, loss: Loss
) -> Float[Tensor, "batch sequence"]:
    """Return a score head's output, sharded or packed, as the whole batch [B, S] in fp32 or fp64.

    Raises:
        ValueError: The output is not one score per token. The message names its shape and the mask's shape.
    """
    scores = output.squeeze(-1) if output.dim() == 3 and output.size(-1) == 1 else output
    mask = loss.mask(data).including_first
    if scores.dim() != 2:
        raise ValueError(
            f"{loss.display_name}: {loss.output_name} {tuple(output.shape)} must be one score per token, [B, S] or "
            f"[B, S, 1] for token_mask {tuple(mask.shape)}"
        )
    layout = sharding.layout(scores, (mask.size(0), mask.size(1)))
    return layout.gather(scores.to(torch.promote_types(scores.dtype, torch.float32)))
