"""The classes that losses derive from: a formula over streams, and how the streams are read off a model's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.logprobs import DeferredLogits, Sharding, next_token_stats
from rl_megatron.losses.calling import Call, as_numbers, bind, refuse_nan
from rl_megatron.losses.contract import Count, LossInputType, LossType, Reduction
from rl_megatron.losses.streams import TokenMask, TokenStreams, require_integers

Method = TypeVar("Method", bound=Callable[..., Any])


def accepts_deferred_logits(read_output: Method) -> Method:
    """Mark a `Loss.read_output` that takes `DeferredLogits` as well as logits, and return it.

    The mark belongs to the method: a subclass with a `read_output` of its own is given whole logits, which is right
    whatever it does with them and only slower, until it says that it takes both.
    """
    read_output.__dict__["accepts_deferred_logits"] = read_output
    return read_output


def _only_reads_and_evaluates(on_output: Method) -> Method:
    """Mark a `Loss.on_output` that hands the output to `read_output` and does nothing else with it; return it."""
    on_output.__dict__["only_reads_and_evaluates"] = on_output
    return on_output


def _adds_nothing_to_evaluate(call: Method) -> Method:
    """Mark a `Loss.__call__` that runs `read_output` and `evaluate` and nothing else, and return it."""
    call.__dict__["adds_nothing_to_evaluate"] = call
    return call


def _is_marked(method: Callable[..., Any], mark: str) -> bool:
    """Return whether the method itself has the mark: `functools.wraps` copies marks to other functions."""
    function = getattr(method, "__func__", method)
    return getattr(function, mark, None) is function


class Loss(ABC):
    """A formula (`evaluate`) over what `read_output` reads off a model's output; it can be called in two forms.

    Every value it returns is divided by a global count, so the parts of a batch add up to the loss of the batch, and
    the gradient of the sum is the sum of the gradients.

    Attributes:
        output_name: what `__call__` calls the model's output.
        input_names: what `evaluate` takes from the output; () if that is the output itself.
        further_positional: keywords of `evaluate` that the form with an output also takes by position.
        output_keys: required keys that only `read_output` reads, such as a teacher's.
        group_size: sequences in a row that no microbatch may separate: 2 for preference pairs.
        next_token_keys: keys of [B, S] streams in data whose entry t corresponds to token t+1.
    """

    loss_type: LossType
    input_type: LossInputType
    output_name: str = "next_token_logits"
    input_names: tuple[str, ...] = ()
    further_positional: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    group_size: int = 1
    next_token_keys: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def metric_reductions(self) -> Mapping[str, Reduction]:
        """Every metric that this instance can return, and how its parts combine.

        It is known without data, so that a rank without data can take part. A metric of an optional input is missing
        if the input is; `Reduction.identity` stands for it.
        """

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Keys of the batch without which this instance cannot run."""
        return ("token_mask", "sample_mask", *self.output_keys)

    @property
    def display_name(self) -> str:
        """What messages call this loss."""
        return type(self).__name__

    @property
    def reads_deferred_logits(self) -> bool:
        """Whether `read_output` takes `DeferredLogits` as well as logits: see `accepts_deferred_logits`.

        A subclass with an `on_output` of its own may read the output itself, and is given whole logits.
        """
        own = _is_marked(self.on_output, "only_reads_and_evaluates")
        return own and _is_marked(self.read_output, "accepts_deferred_logits")

    @property
    def has_own_call(self) -> bool:
        """Whether a subclass replaced `__call__`, which may then do more than `evaluate` does."""
        return not _is_marked(self.__call__, "adds_nothing_to_evaluate")

    @abstractmethod
    def read_output(self, output: Any, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        """Return the keywords of `evaluate` that the model's output gives.

        They are streams aligned with the whole batch, the same on every rank whatever the sharding. Tokens that the
        masks leave out are not evaluated.
        """

    @abstractmethod
    def evaluate(
        self, data: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count, **keywords: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this part's share of the loss and of each metric, as tensors: nothing waits for the device.

        Shapes: data's streams [B, S] aligned with input_ids (but see `next_token_keys`); next-token streams [B, S-1],
            whose entry t corresponds to token t+1. Masked positions may hold anything, NaN included.

        Raises:
            KeyError: a key is missing; names the key and the loss.
            ValueError: shapes do not fit; names both.
            TypeError: a dtype makes no sense; names the key and the dtype.
        """

    @_only_reads_and_evaluates
    def on_output(
        self,
        output: Tensor | DeferredLogits,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        sharding: Sharding,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return what `evaluate` makes of what `read_output` reads. A runner calls nothing else.

        A loss that is NaN is returned: the caller has other ranks to tell before it may raise.
        """
        return self.evaluate(data, global_valid_seqs, global_valid_toks, **self.read_output(output, data, sharding))

    @_adds_nothing_to_evaluate
    def __call__(self, *args: Any, **keywords: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and its metrics as Python numbers. Both forms run `evaluate`.

        Form 1: (output, data, global_valid_seqs, global_valid_toks, vocab_parallel_rank=None,
            vocab_parallel_group=None, context_parallel_group=None, *, valid_vocab_size=None, cu_seqlens=None,
            cu_seqlens_padded=None). The model's output goes by the name `output_name`. With a context_parallel_group
            it is this rank's zigzag slice, with cu_seqlens it is packed (see `Sharding`); data stays whole. Logits
            are divided by data["temperature"] (a number, [B] or [B, S]) if the batch carries one; ids from
            valid_vocab_size on are padding.
        Form 2: (data, global_valid_seqs, global_valid_toks, **inputs) with `input_names`, such as next_token_logprobs
            [B, S-1]. Other keywords go to `evaluate` in both forms.

        In form 1 backward writes the gradient over the logits unless they are a leaf: see `vocab_parallel_logprobs`.
        A second loss on the same logits needs a clone of them.

        Raises:
            NaNLoss: a ValueError: the loss is NaN because an input is NaN at a token or sample that counts; names the
                input and the position.
            ValueError: shapes do not fit. Other errors of `evaluate` are raised as well.
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
        """Return the call that `__call__` runs: the place for forms of call that only one loss has."""
        return call

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a tensor in the first place of a call."""
        return self.output_name

    def streams(self, data: Mapping[str, Any], like: Tensor) -> TokenStreams:
        """Return data's streams in the dtype and on the device of `like`, once the keys that `evaluate` needs exist."""
        keys = tuple(key for key in self.required_keys if key not in self.output_keys)
        return TokenStreams(data, like, self.display_name, keys, self.next_token_keys)

    def mask(self, data: Mapping[str, Any]) -> TokenMask:
        """Return which tokens of data count."""
        return TokenMask.of(data, self.display_name)


class LogprobLoss(Loss):
    """A loss over next-token logprobs, `evaluate(…, next_token_logprobs, next_token_entropy=None)`, each [B, S-1].

    Its logits form takes next_token_logits [B, S, V/tp], or with a context_parallel_group [B, S/cp, V/tp].
    """

    input_type = LossInputType.LOGPROB
    output_name = "next_token_logits"
    input_names = ("next_token_logprobs",)

    def name_of(self, tensor: Tensor) -> str:
        return self.input_names[0] if tensor.dim() == 2 else self.output_name  # logits have a vocabulary

    @property
    def needs_entropy(self) -> bool:
        """Whether `evaluate` needs `next_token_entropy`; it costs almost nothing in the same pass over the logits."""
        return False

    @accepts_deferred_logits
    def read_output(
        self, output: Tensor | DeferredLogits, data: Mapping[str, Any], sharding: Sharding
    ) -> dict[str, Tensor]:
        stats = next_token_stats(
            output,
            require_integers(data, "input_ids", self.display_name).to(output.device),
            sharding,
            temperature=data["temperature"] if "temperature" in data else 1.0,
            entropy=self.needs_entropy,
            mask=self.mask(data).including_first.to(output.device),
        )
        streams = {"next_token_logprobs": stats.logprobs}
        return streams | ({} if stats.entropy is None else {"next_token_entropy": stats.entropy})


class ScoreLoss(Loss):
    """A loss over one number a token, `evaluate(…, next_token_scores)` [B, S-1].

    Entry t is what a model with a score head says after token t, about the prefix that token t+1 extends. The output
    form takes scores [B, S] or [B, S, 1], or with a context_parallel_group [B, S/cp(, 1)]. A subclass may give both
    names of its own.
    """

    input_type = LossInputType.LOGIT
    output_name = "scores"
    input_names = ("next_token_scores",)

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        return {self.input_names[0]: token_scores(output, data, sharding, self)[:, :-1]}


def token_scores(
    output: Shaped[Tensor, "rows length *one"], data: Mapping[str, Any], sharding: Sharding, loss: Loss
) -> Float[Tensor, "batch sequence"]:
    """Return a score head's output [B, S] or [B, S, 1], sharded or packed, as whole [B, S] in fp32 or more.

    Raises:
        ValueError: the output is not one score a token; names its shape and the mask's.
    """
    scores = output.squeeze(-1) if output.dim() == 3 and output.size(-1) == 1 else output
    mask = loss.mask(data).including_first
    if scores.dim() != 2:
        raise ValueError(
            f"{loss.display_name}: {loss.output_name} {tuple(output.shape)} must be one score a token, [B, S] or "
            f"[B, S, 1] for token_mask {tuple(mask.shape)}"
        )
    layout = sharding.layout(scores, (mask.size(0), mask.size(1)))
    return layout.gather(scores.to(torch.promote_types(scores.dtype, torch.float32)))
