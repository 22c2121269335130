"""`MixedSource`: the data sets of `data.mix`, each read by its own data source."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import USUAL_EVAL_EXAMPLES, DataConfig, StageConfig
from rl_megatron.data.conversations import is_conversation
from rl_megatron.data.mixture import MixtureCounts, load_weights
from rl_megatron.data.records import Record
from rl_megatron.data.sources.source import DataSource, HeldoutBatch, HeldoutProblemSet
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.data.tokenizer import Tokenizer


def split_mixture(stage: StageConfig) -> list[tuple[str, StageConfig]]:
    """Return, for each data set of a mixture, its name and the stage with only this data set."""
    data = stage.data
    whole = dataclasses.replace(data, mix=(), mix_weights=None)
    sections = []
    for data_set, share in zip(data.mix, _share_eval_examples(data), strict=True):
        location = {key: getattr(data_set, key) for key in ("path", "dataset_name", "subset", "split")}
        columns = data.columns if data_set.columns is None else data_set.columns
        # No section gets `eval_path`: its data is held out for the whole mixture.
        number = None if data.num_eval_examples is None else share
        section = dataclasses.replace(whole, **location, columns=columns, eval_path=None, num_eval_examples=number)
        sections.append((data_set.shown_name, dataclasses.replace(stage, data=section)))
    return sections


def _share_eval_examples(data: DataConfig) -> list[int]:
    """Return how many held-out examples each data set gives, by its weight: an even number, at least 2."""
    names, weights = [data_set.shown_name for data_set in data.mix], [data_set.weight for data_set in data.mix]
    pairs = max(1, (data.num_eval_examples or USUAL_EVAL_EXAMPLES) // 2)
    counts = MixtureCounts(names, pairs, lambda step: weights)
    return [max(2, 2 * count) for count in counts.at(0)[1]]


class MixedSource(DataSource[DataConfig]):
    """The source of several data sets of one kind.

    Held-out data comes from `data.eval_path` or, if that is null, from each data set by its weight in `data.mix`.
    """

    def __init__(self, stage: StageConfig, sources: Sequence[DataSource[Any]]):
        super().__init__(stage, stage.data)
        self.sources = sources

    @property
    def num_left_out(self) -> int:
        """Return how many training records are skipped at the beginnings of the data sets, in total."""
        return sum(source.num_left_out for source in self.sources)

    @property
    def num_held_out(self) -> int:
        """Return how many held-out records were taken from the training records of all data sets."""
        return sum(source.num_held_out for source in self.sources)

    def first_record(self) -> Record | None:
        """Return the first training record of the first data set."""
        return self.sources[0].first_record()

    def check_files(self, tokenizer: Tokenizer | None) -> None:
        """Check the files of every data set, and the weights of the first step."""
        for source in self.sources:
            source.check_files(tokenizer)
        names = [data_set.shown_name for data_set in self.data.mix]
        self._check_kinds(names)
        MixtureCounts(names, 1, load_weights(self.data)).at(0)

    def _check_kinds(self, names: Sequence[str]) -> None:
        """Refuse a mixture in which `format=auto` would render one data set as plain text and another as a chat."""
        records = [source.first_record() for source in self.sources]
        kinds = {is_conversation(record): name for record, name in zip(records, names, strict=True) if record}
        if self.data.format == "auto" and len(kinds) == 2:
            raise ValueError(
                f"data.mix: the records of {kinds[True]} are conversations, and those of {kinds[False]} have no "
                "messages: set data.format=chat, which renders both kinds with the chat template."
            )

    def texts(self) -> Iterator[str]:
        """Yield the training text of every data set."""
        return itertools.chain.from_iterable(source.texts() for source in self.sources)

    def task(self) -> Task:
        """Return the task of the first data set."""
        return self.sources[0].task()

    def problems(self, wanted: int) -> list[Problem]:
        """Return the training problems of all data sets."""
        return [problem for source in self.sources for problem in source.problems(wanted)]

    def problems_to_check(self) -> list[Problem]:
        """Return the problems of all data sets whose records are examined before the first step."""
        return [problem for source in self.sources for problem in source.problems_to_check()]

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch | HeldoutProblemSet:
        """Return held-out data of `data.eval_path`, or of every data set."""
        if self.data.eval_path is not None:
            section = dataclasses.replace(self.data, path=self.data.eval_path, mix=(), mix_weights=None)
            return type(self.sources[0])(dataclasses.replace(self.stage, data=section), section).heldout(tokenizer)
        shares = zip(self.data.mix, self.sources, _share_eval_examples(self.data), strict=True)
        parts = [
            _take_first(_read_heldout(source, data_set.shown_name, tokenizer), share)
            for data_set, source, share in shares
        ]
        sets = [part for part in parts if isinstance(part, HeldoutProblemSet)]
        if sets:
            return HeldoutProblemSet(sets[0].task, [problem for part in sets for problem in part.problems])
        return _join([part for part in parts if isinstance(part, HeldoutBatch)], tokenizer)


def _read_heldout(source: DataSource[Any], name: str, tokenizer: Tokenizer) -> HeldoutBatch | HeldoutProblemSet:
    try:
        return source.heldout(tokenizer)
    except ConfigError as error:
        raise ConfigError(f"data.mix, the share of {name}: {error}") from error


def _take_first(heldout: HeldoutBatch | HeldoutProblemSet, count: int) -> HeldoutBatch | HeldoutProblemSet:
    """Return the first `count` held-out sequences or problems of a data set."""
    if isinstance(heldout, HeldoutProblemSet):
        return dataclasses.replace(heldout, problems=heldout.problems[:count])
    size = min(count, heldout.batch.size)
    num_items = len(heldout.locations) * size // heldout.batch.size
    return dataclasses.replace(heldout, batch=heldout.batch.slice(0, size), locations=heldout.locations[:num_items])


def _join(parts: list[HeldoutBatch], tokenizer: Tokenizer) -> HeldoutBatch:
    from rl_megatron.data.batch import BatchedDataDict

    batch = BatchedDataDict.from_batches([part.batch for part in parts], {"input_ids": tokenizer.pad_id})
    factors = [part.tokens_per_character for part in parts if part.tokens_per_character is not None]
    if len(factors) < len(parts):
        return HeldoutBatch(batch, locations=tuple(location for part in parts for location in part.locations))
    tokens = [float(part.batch["token_mask"].sum()) for part in parts]
    characters = sum(number / factor for number, factor in zip(tokens, factors, strict=True))
    return HeldoutBatch(batch, sum(tokens) / characters)
