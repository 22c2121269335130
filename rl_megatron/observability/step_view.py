"""Show what the model sees in a step: each token of the batch with its loss mask, or the prompts to answer.

Batches, prompts and microbatches come from the functions that training calls. Neither a model nor a process group is
needed, and megatron-core is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import PADDING, Microbatch, padded_lengths
from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.batching.step_microbatches import form_microbatches, plan_step
from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.data import PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.sources import HeldoutBatch, build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import EncodedPrompts, RolloutPrompts, build_dataset_loader, encode_prompts
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.observability.batch_view import BatchView, ShownGroup, ShownSequence, Token
from rl_megatron.topology.degrees import ConfiguredLayout

_SIDES = ("chosen", "rejected")


def view_step(name: str, stage: StageConfig, tokenizer: Tokenizer, step: int, ranks: int) -> BatchView:
    """Return what a stage's model sees in step `step`, counted from 1, on `ranks` ranks.

    Raise ConfigError for an impossible step or number of ranks, and ValueError if the data cannot be used.
    """
    if not 1 <= step <= stage.train.steps:
        raise ConfigError(f"--step {step}: stage {name!r} has the steps 1 to {stage.train.steps} (train.steps)")
    title = f"stage {name} ({stage.algorithm.name}), step {step} of {stage.train.steps}"
    if isinstance(stage.algorithm, RolloutConfig):
        prompts = RolloutPrompts(stage, stage.algorithm, tokenizer)
        encoded = EncodedPrompts(prompts.at(step), prompts.end_of_turn_ids)
        return _view_prompts(title, stage, tokenizer, encoded)
    if stage.algorithm.learns_from == PROBLEMS:
        raise ConfigError(
            f"algorithm={stage.algorithm.name} chooses its prompts itself, because its settings are not a "
            "RolloutConfig; --heldout shows its held-out problems"
        )
    loader = build_dataset_loader(stage, tokenizer)
    locations, batch = loader.locations(step - 1), loader.batch(step - 1)
    return _view_batch(title, stage, tokenizer, batch, locations, loader.group_size, ranks)


def view_heldout(name: str, stage: StageConfig, tokenizer: Tokenizer, ranks: int) -> BatchView:
    """Return what a stage's evaluations see. It raises the same errors as `view_step`."""
    title = f"stage {name} ({stage.algorithm.name}), held-out data"
    source = build_source(stage)
    heldout = source.heldout(tokenizer)
    if isinstance(heldout, HeldoutBatch):
        size = build_dataset_loader(stage, tokenizer).group_size
        return _view_batch(title, stage, tokenizer, heldout.batch, heldout.locations, size, ranks)
    prompts = encode_prompts(stage, heldout.problems, source.renderer(tokenizer))
    return _view_prompts(title, stage, tokenizer, prompts, greedy=True)


# --- sequences with a loss mask ---


def _view_batch(
    title: str,
    stage: StageConfig,
    tokenizer: Tokenizer,
    batch: BatchedDataDict,
    locations: Sequence[str],
    group_size: int,
    ranks: int,
) -> BatchView:
    layout = ConfiguredLayout.from_config(stage.parallel, ranks)
    cost = SequenceCost.from_model(stage.model, tokenizer.vocab_size)
    batching = Batching.from_config(stage.train)
    if group_size > 1 and batching.share_prefixes:
        batch = batch | {PREFIX_SET: torch.arange(batch.size) // group_size}
    whole = Batch.from_whole(batch)
    planned = plan_step(whole, 0, whole.size, batching, layout, 0, group_size, cost)
    reader = _TokenReader(tokenizer)
    groups = [
        _view_microbatch(whole, chosen, microbatch, layout, rank, number, locations, group_size, reader)
        for rank, shapes in enumerate(planned.ranks)
        for number, (chosen, microbatch) in enumerate(
            zip(shapes.sequences, form_microbatches(whole, planned, shapes), strict=True)
        )
    ]
    sequences = list(chain.from_iterable(group.sequences for group in groups))
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    trained = sum(sequence.num_trained for sequence in sequences)
    padding = sum(sequence.padding for sequence in sequences)
    share = trained / max(tokens, 1)
    per_rank = len(planned.local.sequences)
    on = f" on each of {layout.data} data-parallel ranks" if layout.data > 1 else ""
    is_padded = batching.kind == "padded"
    limit = _format_count(batching.sequences, "sequence") if is_padded else f"{batching.tokens:,} tokens"
    facts = [
        ("data", _describe_data(stage)),
        ("sequences", f"{batch.size}" + (f" ({batch.size // 2} pairs)" if group_size == 2 else "")),
        ("tokens", f"{tokens:,}, of which {trained:,} are trained ({share:.1%}); {padding:,} padding"),
        ("microbatches", f"{per_rank}{on}: train.batching={batching.kind}, at most {limit} each"),
        ("efficiency", f"{planned.efficiency:.1%} of the token positions that the model computes are tokens"),
    ]
    if planned.local.shares_prefixes:
        facts[-1] = (
            "efficiency",
            f"{planned.efficiency:.2f} tokens per token position that the model computes: sequences share "
            "their beginnings (train.share_prefixes)",
        )  # fmt: skip
    return BatchView(title, facts, groups)


def _view_microbatch(
    batch: Batch,
    chosen: Sequence[int],
    microbatch: Microbatch,
    layout: ConfiguredLayout,
    rank: int,
    number: int,
    locations: Sequence[str],
    group_size: int,
    reader: _TokenReader,
) -> ShownGroup:
    tree, total = microbatch.tree, None
    if microbatch.lengths is None:
        widths = [microbatch.shape(layout)[1]] * len(chosen)
    elif tree is None:
        widths = padded_lengths(microbatch.lengths, layout)
    else:
        padded = padded_lengths([segment.length for segment in tree.segments], layout)
        padding = [width - segment.length for width, segment in zip(padded, tree.segments, strict=True)]
        widths = [length + padding[path[-1]] for length, path in zip(microbatch.lengths, tree.paths, strict=True)]
        total = sum(padded)
    sequences = []
    for position, width, ids, mask, weight in zip(
        chosen,
        widths,
        microbatch.batch["input_ids"].tolist(),
        microbatch.batch["token_mask"].tolist(),
        microbatch.batch["sample_mask"].tolist(),
        strict=True,
    ):
        if position == PADDING:
            sequences.append(ShownSequence("padding sequence, zero loss weight", [], padding=width))
            continue
        length = max(int(batch.lengths[position]), 1)
        tokens = reader.read(ids[:length], [bool(entry) and weight != 0 for entry in mask[:length]])
        title = f"sequence {position}" + (f", {_SIDES[position % 2]}" if group_size == 2 else "")
        location = locations[position // group_size] if locations else ""
        sequences.append(ShownSequence(_join(title, location), tokens, padding=width - length))
    if tree is None:
        pack = tuple((sequence.title, len(sequence.tokens), sequence.padding) for sequence in sequences)
    else:
        pack = tuple(_view_segment(tree, index, padding[index], sequences) for index in range(len(tree.segments)))
    on_rank = f" of data-parallel rank {rank}" if layout.data > 1 else ""
    return ShownGroup(
        f"microbatch {number + 1}{on_rank}: {_format_count(len(chosen), 'sequence')}, "
        f"{sum(widths) if total is None else total:,} token positions",
        sequences,
        pack if microbatch.lengths is not None else (),
    )


def _view_segment(
    tree: PrefixTree, index: int, padding: int, sequences: Sequence[ShownSequence]
) -> tuple[str, int, int]:
    """Return the entry of `ShownGroup.pack` of a segment, whose title has the numbers of its sequences."""
    segment = tree.segments[index]
    sharing = [sequence for sequence, path in zip(sequences, tree.paths, strict=True) if index in path]
    if not sharing[0].tokens:
        return sharing[0].title, 0, segment.length + padding
    numbers = "+".join(sequence.title.removeprefix("sequence ").partition(",")[0] for sequence in sharing)
    last = segment.begin + segment.length - 1
    return f"sequence {numbers}, tokens {segment.begin} to {last}", segment.length, padding


# --- prompts ---


def _view_prompts(
    title: str,
    stage: StageConfig,
    tokenizer: Tokenizer,
    encoded: EncodedPrompts,
    greedy: bool = False,
) -> BatchView:
    reader, prompts = _TokenReader(tokenizer), encoded.prompts
    sampling = make_sampling(stage, tokenizer, greedy, encoded.end_of_turn_ids)
    sequences = [
        ShownSequence(
            _join(f"prompt {number}", prompt.problem.location),
            reader.read(prompt.ids),
            note=f"reference answer: {prompt.problem.answer}" if prompt.problem.answer else "",
        )
        for number, prompt in enumerate(prompts)
    ]
    algorithm, num_tokens = stage.algorithm, sum(len(sequence.tokens) for sequence in sequences)
    samples = 1 if greedy else getattr(algorithm, "samples_per_prompt", 1)
    rounds = 1 if greedy else getattr(algorithm, "rounds_per_step", 1)
    answers = f"{_format_count(samples, 'completion')} each, {samples * len(prompts)} in all"
    settings = [f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"]
    settings += [f"top_k {sampling.top_k}"] * (sampling.top_k > 0) + [f"top_p {sampling.top_p}"] * (sampling.top_p < 1)
    stops = ", ".join(f"{tokenizer.decode_token(id_)!r} ({id_})" for id_ in dict.fromkeys(sampling.stop_ids))
    facts = [
        ("data", _describe_data(stage)),
        ("prompts", f"{len(prompts)}, {num_tokens:,} tokens; {'answered greedily' if greedy else answers}"),
        ("completions", f"at most {sampling.max_new_tokens} tokens; {', '.join(settings)}"),
        ("stop tokens", stops),
    ]
    if stage.generation.stop_strings:
        facts.append(("stop strings", ", ".join(map(repr, stage.generation.stop_strings))))
    if stage.reward.functions:
        facts.append(("rewards", ", ".join(function.shown_name for function in stage.reward.functions)))
    if rounds > 1:
        facts.append(("rounds", f"these are the prompts of the first round; a step has at most {rounds}"))
    return BatchView(title, facts, [ShownGroup("prompts", sequences)], has_mask=False)


# --- both ---


class _TokenReader:
    """The decoder of token ids into the tokens that are shown."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {*tokenizer.special_tokens.values(), tokenizer.eos_id, tokenizer.pad_id}

    def read(self, ids: Sequence[int], trained: Sequence[bool] | None = None) -> list[Token]:
        """Return the tokens of a sequence. `trained` marks those that count in the loss; None marks none."""
        texts = self._tokenizer.decode_tokens(ids)
        values = zip(ids, texts, trained or [False] * len(ids), strict=True)
        return [Token(token_id, text, flag, token_id in self._special) for token_id, text, flag in values]


def _join(title: str, location: str) -> str:
    return f"{title}, {location}" if location else title


def _describe_data(stage: StageConfig) -> str:
    """Return a short text that names the data source and what it reads."""
    data = stage.data
    paths = [data.path] if isinstance(data.path, str) else list(data.path or ())
    parts = [f"task {data.task['name']}"] if "name" in data.task else []
    parts += [name for name in (*paths, data.dataset_name) if name is not None]
    parts += [source.shown_name for source in data.mix]
    return ", ".join([data.source, *parts])


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
