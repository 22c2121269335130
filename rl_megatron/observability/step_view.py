"""What the model sees in a step: every token of its batch with its loss mask, or the prompts that it answers.

Batches, prompts and microbatches come from the functions that training calls. Neither a model nor a process group is
needed, and megatron-core is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import Microbatch, padded_lengths
from rl_megatron.batching.step_microbatches import form_microbatches, plan_step
from rl_megatron.batching.step_plan import PADDING
from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.data import PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.sources import HeldoutBatch, build_source
from rl_megatron.data.stage_loader import dataset_loader
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import EncodedPrompts, RolloutPrompts, encoded_prompts
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.observability.batch_view import BatchView, ShownGroup, ShownSequence, Token
from rl_megatron.topology.degrees import ConfiguredLayout

_SIDES = ("chosen", "rejected")


def view_step(name: str, stage: StageConfig, tokenizer: Tokenizer, step: int, ranks: int) -> BatchView:
    """Return what a stage's model sees in step `step`, counted from 1, on `ranks` ranks.

    Raises:
        ConfigError: The stage has no such step, the ranks do not fit the parallel degrees, or its algorithm's data
            cannot be shown.
        ValueError: The data cannot be used.
    """
    if not 1 <= step <= stage.train.steps:
        raise ConfigError(f"--step {step}: stage {name!r} has the steps 1 to {stage.train.steps} (train.steps)")
    title = f"stage {name} ({stage.algorithm.name}), step {step} of {stage.train.steps}"
    if isinstance(stage.algorithm, RolloutConfig):
        prompts = RolloutPrompts(stage, stage.algorithm, tokenizer)
        shown = EncodedPrompts(prompts.at(step), prompts.end_of_turn_ids)
        return _prompts_view(title, stage, tokenizer, shown)
    if stage.algorithm.learns_from == PROBLEMS:
        raise ConfigError(
            f"algorithm={stage.algorithm.name} chooses its prompts itself, because its settings are not a "
            "RolloutConfig; --heldout shows its held-out problems"
        )
    loader = dataset_loader(stage, tokenizer)
    places, batch = loader.locations(step - 1), loader.batch(step - 1)
    return _batch_view(title, stage, tokenizer, batch, places, loader.group_size, ranks)


def view_heldout(name: str, stage: StageConfig, tokenizer: Tokenizer, ranks: int) -> BatchView:
    """Return what a stage's evaluations see.

    Raises:
        ConfigError: No data is held out, or the ranks do not fit the parallel degrees.
        ValueError: The data cannot be used.
    """
    title = f"stage {name} ({stage.algorithm.name}), held-out data"
    source = build_source(stage)
    heldout = source.heldout(tokenizer)
    if isinstance(heldout, HeldoutBatch):
        size = dataset_loader(stage, tokenizer).group_size
        return _batch_view(title, stage, tokenizer, heldout.batch, heldout.locations, size, ranks)
    prompts = encoded_prompts(stage, heldout.problems, source.renderer(tokenizer))
    return _prompts_view(title, stage, tokenizer, prompts, greedy=True)


# --- sequences with a loss mask ---


def _batch_view(
    title: str,
    stage: StageConfig,
    tokenizer: Tokenizer,
    batch: BatchedDataDict,
    places: Sequence[str],
    group_size: int,
    ranks: int,
) -> BatchView:
    layout = ConfiguredLayout.of(stage.parallel, ranks)
    cost = SequenceCost.of_model(stage.model, tokenizer.vocab_size)
    batching = Batching.of(stage.train)
    whole = Batch.whole(batch)
    planned = plan_step(whole, 0, whole.size, batching, layout, 0, group_size, cost)
    shown = _Shown(tokenizer)
    groups = [
        _microbatch_view(whole, chosen, microbatch, layout, rank, number, places, group_size, shown)
        for rank, shapes in enumerate(planned.ranks)
        for number, (chosen, microbatch) in enumerate(
            zip(shapes.sequences, form_microbatches(whole, planned, shapes), strict=True)
        )
    ]
    sequences = list(chain.from_iterable(group.sequences for group in groups))
    tokens, trained = (sum(map(count, sequences)) for count in (lambda s: len(s.tokens), lambda s: s.num_trained))
    padding = sum(sequence.padding for sequence in sequences)
    share = trained / max(tokens, 1)
    per_rank = len(planned.shapes.sequences)
    on = f" on each of {layout.data} data-parallel ranks" if layout.data > 1 else ""
    facts = [
        ("data", _data(stage)),
        ("sequences", f"{batch.size}" + (f" ({batch.size // 2} pairs)" if group_size == 2 else "")),
        ("tokens", f"{tokens:,}, of which {trained:,} are trained ({share:.1%}); {padding:,} padding"),
        ("microbatches", f"{per_rank}{on}: train.batching={batching.kind}, {_limit(batching)}"),
        ("efficiency", f"{planned.efficiency:.1%} of the token positions that the model computes are tokens"),
    ]
    return BatchView(title, facts, groups)


def _microbatch_view(
    batch: Batch,
    chosen: Sequence[int],
    microbatch: Microbatch,
    layout: ConfiguredLayout,
    rank: int,
    number: int,
    places: Sequence[str],
    group_size: int,
    shown: _Shown,
) -> ShownGroup:
    if microbatch.lengths is None:
        widths = [microbatch.shape(layout)[1]] * len(chosen)
    else:
        widths = padded_lengths(microbatch.lengths, layout)
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
        tokens = shown.tokens(ids[:length], [bool(entry) and weight != 0 for entry in mask[:length]])
        title = f"sequence {position}" + (f", {_SIDES[position % 2]}" if group_size == 2 else "")
        place = places[position // group_size] if places else ""
        sequences.append(ShownSequence(_with_place(title, place), tokens, padding=width - length))
    pack = tuple((sequence.title, len(sequence.tokens), sequence.padding) for sequence in sequences)
    of_rank = f" of data-parallel rank {rank}" if layout.data > 1 else ""
    return ShownGroup(
        f"microbatch {number + 1}{of_rank}: {_counted(len(chosen), 'sequence')}, {sum(widths):,} token positions",
        sequences,
        pack if microbatch.lengths is not None else (),
    )


def _limit(batching: Batching) -> str:
    if batching.kind == "padded":
        return f"at most {_counted(batching.sequences, 'sequence')} each"
    return f"at most {batching.tokens:,} tokens each"


# --- prompts ---


def _prompts_view(
    title: str,
    stage: StageConfig,
    tokenizer: Tokenizer,
    encoded: EncodedPrompts,
    greedy: bool = False,
) -> BatchView:
    shown, prompts = _Shown(tokenizer), encoded.prompts
    sampling = make_sampling(stage, tokenizer, greedy, encoded.end_of_turn_ids)
    sequences = [
        ShownSequence(_with_place(f"prompt {number}", prompt.problem.location), shown.tokens(prompt.ids), note=note)
        for number, (prompt, note) in enumerate(zip(prompts, map(_note, prompts), strict=True))
    ]
    algorithm, num_tokens = stage.algorithm, sum(len(sequence.tokens) for sequence in sequences)
    samples = 1 if greedy else getattr(algorithm, "samples_per_prompt", 1)
    rounds = 1 if greedy else getattr(algorithm, "rounds_per_step", 1)
    each = f"{_counted(samples, 'completion')} each, {samples * len(prompts)} in all"
    filters = [f"top_k {sampling.top_k}"] * (sampling.top_k > 0) + [f"top_p {sampling.top_p}"] * (sampling.top_p < 1)
    stops = ", ".join(f"{tokenizer.token_text(id_)!r} ({id_})" for id_ in dict.fromkeys(sampling.stop_ids))
    facts = [
        ("data", _data(stage)),
        ("prompts", f"{len(prompts)}, {num_tokens:,} tokens; {'answered greedily' if greedy else each}"),
        ("completions", f"at most {sampling.max_new_tokens} tokens; " + _listed(sampling.temperature, filters)),
        ("stop tokens", stops),
    ]
    if stage.generation.stop_strings:
        facts.append(("stop strings", ", ".join(map(repr, stage.generation.stop_strings))))
    if stage.reward.functions:
        facts.append(("rewards", ", ".join(function.shown_name for function in stage.reward.functions)))
    if rounds > 1:
        facts.append(("rounds", f"these are the prompts of the first round; a step has at most {rounds}"))
    return BatchView(title, facts, [ShownGroup("prompts", sequences)], has_mask=False)


def _listed(temperature: float, filters: list[str]) -> str:
    return ", ".join([f"temperature {temperature:g}" if temperature else "greedy", *filters])


def _note(prompt: EncodedPrompt) -> str:
    return f"reference answer: {prompt.problem.answer}" if prompt.problem.answer else ""


def _with_place(title: str, place: str) -> str:
    return f"{title}, {place}" if place else title


# --- both ---


class _Shown:
    """Makes tokens as they are shown."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {*tokenizer.special_tokens.values(), tokenizer.eos_id, tokenizer.pad_id}

    def tokens(self, ids: Sequence[int], trained: Sequence[bool] | None = None) -> list[Token]:
        """Return the tokens of a sequence, and which are trained; None if it has no loss mask."""
        texts = self._tokenizer.token_texts(ids)
        flags = [False] * len(ids) if trained is None else trained
        values = zip(ids, texts, flags, strict=True)
        return [Token(token_id, text, flag, token_id in self._special) for token_id, text, flag in values]


def _data(stage: StageConfig) -> str:
    """Return the data source and what it reads, in short."""
    data = stage.data
    paths = [data.path] if isinstance(data.path, str) else list(data.path or ())
    places = [f"task {data.task['name']}"] if "name" in data.task else []
    places += [place for place in (*paths, data.dataset_name) if place is not None]
    places += [each.shown_name for each in data.mix]
    return ", ".join([data.source, *places])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
