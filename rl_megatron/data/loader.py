"""`DataLoader`: the batches of a stage, step after step, from one data set or from a mixture of several.

The items of batch n depend only on the settings, the data and n. Data sets in memory need no saved state. The position
of a streamed data set is saved in checkpoints, so that a resumed run does not reread earlier records.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rl_megatron import log
from rl_megatron.config.errors import ConfigError, convert_errors
from rl_megatron.data import encoding
from rl_megatron.data.mixture import MixtureCounts
from rl_megatron.data.order import ShuffledEpochs, epoch_order
from rl_megatron.data.records import NothingLeft, Position, Reader, Record
from rl_megatron.topology.ranks import Ranks

BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)
ItemT = TypeVar("ItemT")


class Items(Protocol[BatchT_co]):
    """Items in memory that become batches: a `Dataset`, or prompts."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def batch(self, items: Sequence[int], /) -> BatchT_co:
        """Return the items with these indices as a batch."""
        ...


class ItemList(Generic[ItemT]):
    """Items whose batch is a list of them."""

    def __init__(self, items: Sequence[ItemT]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, items: Sequence[int], /) -> list[ItemT]:
        """Return the items with these indices."""
        return [self.items[index] for index in items]


class Drawn(NamedTuple, Generic[BatchT]):
    """One drawn item: the items that it belongs to, its index among them, and a key that is the same in every epoch."""

    among: Items[BatchT]
    index: int
    key: Hashable


class Component(ABC, Generic[BatchT]):
    """One data set of a loader.

    Attributes:
        name: Its name in messages and in a loader's state.
        first: The items that are checked before the first step: all, or those of the first block.
    """

    name: str
    first: Items[BatchT]

    @abstractmethod
    def draw(self, start: int, count: int) -> list[Drawn[BatchT]]:
        """Return the next `count` items. `start` is the number of items that were drawn before."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position as plain values, or None if the data set is in memory and needs no saved position."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue at a position that `state_dict` returned; None means the beginning."""


class InMemory(Component[BatchT]):
    """A data set whose items are all in memory. They are drawn in shuffled epochs."""

    def __init__(self, name: str, items: Items[BatchT], seed: int | str):
        self.name, self.first = name, items
        self._epochs = ShuffledEpochs(len(items), seed)

    def draw(self, start: int, count: int) -> list[Drawn[BatchT]]:
        """Return `count` items, from position `start` in the sequence of all epochs."""
        return [Drawn(self.first, index, index) for index in self._epochs.items(start, count)]


class Streamed(Component[BatchT]):
    """A data set that is read block by block. Every epoch has the same blocks, but another order within each.

    A block without items, for example because all its records are too long and dropped, is skipped.

    Args:
        name: Its name.
        reader: The reader of its training records.
        build: Returns the items that are made of a block's records.
        block_size: The number of records in a block.
        seed: The seed of the order within blocks.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        build: Callable[[list[Record]], Items[BatchT]],
        block_size: int,
        seed: int | str,
    ):
        self.name, self._reader, self._build = name, reader, build
        self._block_size, self._seed, self._num_built = block_size, seed, 0
        self._nothing: ConfigError | None = None
        self.load_state_dict(None)
        first = self._open_block()
        if first is None:
            raise self._nothing or ValueError(reader.nothing)
        self.first = first

    def draw(self, start: int, count: int) -> list[Drawn[BatchT]]:
        """Return the next `count` items."""
        drawn: list[Drawn[BatchT]] = []
        while len(drawn) < count:
            items = self._items or self._open_block() or self._open_epoch()
            indices = self._order[self._place : self._place + count - len(drawn)]
            drawn += [Drawn(items, index, (self._block, index)) for index in indices]
            self._place += len(indices)
            if self._place == len(self._order):
                self._end_block()
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, block, the reader's position at the block's start, and the index among its shuffled items."""
        return {"epoch": self._epoch, "block": self._block, "start": list(self._start), "place": self._place}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue at a position."""
        position = state or {"epoch": 0, "block": 0, "start": (), "place": 0}
        self._epoch, self._block, self._place = position["epoch"], position["block"], position["place"]
        self._start: Position = tuple(position["start"])
        self._end: Position = ()
        self._items: Items[BatchT] | None = None
        self._order: list[int] = []
        self._reading: Iterator[tuple[Record, Position]] | None = None

    def _open_block(self) -> Items[BatchT] | None:
        """Return the items of the next block that has any, or None if the epoch has no such block left."""
        while read := self._read_block():
            self._end = read[-1][1]
            self._items = self._build_items([record for record, _ in read])
            if self._items:
                self._order = epoch_order(len(self._items), f"{self._seed}/block {self._block}", self._epoch).tolist()
                return self._items
            self._end_block()
        return None

    def _open_epoch(self) -> Items[BatchT]:
        """Begin the next epoch, and return the items of its first block that has any."""
        self._epoch, self._block, self._place, self._start, self._reading = self._epoch + 1, 0, 0, (), None
        items = self._open_block()
        if items is None:  # the data has changed since the previous epoch
            raise self._nothing or ConfigError(self._reader.nothing)
        return items

    def _read_block(self) -> list[tuple[Record, Position]]:
        if self._reading is None:
            self._reading = self._reader.read(self._start)
        reading = self._reading
        return convert_errors(lambda: list(itertools.islice(reading, self._block_size)))

    def _build_items(self, records: list[Record]) -> Items[BatchT] | None:
        """Return the items of a block, or None if it has none."""
        self._num_built += 1
        try:
            with _log_rarely(self._num_built):
                # An error in the data becomes a ConfigError, which ends the run with a one-line message at any step.
                return convert_errors(lambda: self._build(records))
        except ConfigError as error:
            if not isinstance(error.__cause__, NothingLeft):
                raise
            if self._nothing is None:
                log.LOGGER.warning("%s: blocks without an item are skipped (%s)", self.name, error)
            self._nothing = error
            return None

    def _end_block(self) -> None:
        self._items, self._block, self._place, self._start = None, self._block + 1, 0, self._end


@contextmanager
def _log_rarely(number: int) -> Iterator[None]:
    """Silence the warnings about a block's records, unless `number` (of blocks built so far) is a power of two."""
    logger = logging.getLogger(encoding.__name__)
    level = logger.level
    if number & (number - 1):
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass
class DataLoader(Generic[BatchT]):
    """The batches of a stage, numbered from 0.

    Attributes:
        components: The data sets, at least one.
        counts: How many items each data set contributes to each batch.
        seed: The seed of the order in which items of several data sets are mixed within a batch.
        join: Joins batches into one, with the items in the order of the given indices.
        can_fail: Whether a batch may fail on some ranks only, because it is read from files or a user's function
            returns the weights of the mixture.
        ranks: The ranks that draw each batch together if `can_fail`. The stage that uses the loader sets them.
        data_sets: For each item of the last batch, the name of its data set.
    """

    components: Sequence[Component[BatchT]]
    counts: MixtureCounts
    seed: int
    join: Callable[[list[BatchT], list[int]], BatchT]
    can_fail: bool = False
    ranks: Ranks = Ranks()

    def __post_init__(self) -> None:
        self._next = 0
        self.data_sets: list[str] = []

    @property
    def group_size(self) -> int:
        """Return the number of sequences of an item: two for a preference pair."""
        return getattr(self.components[0].first, "group_size", 1)

    @property
    def is_streamed(self) -> bool:
        """Return whether any data set is read block by block; for an earlier batch, reading starts at the beginning."""
        return any(component.state_dict() is not None for component in self.components)

    def batch(self, number: int) -> BatchT:
        """Return batch `number`. If it is not after the last call's batch, streamed data is read from the beginning.

        If `can_fail`, this is a collective call, and a ConfigError while items are drawn is raised on every rank.
        """
        return self._build_batch(self._draw_together(number))

    def part(self, number: int, part: int, parts: int) -> BatchT | None:
        """Return one of the `parts` consecutive parts of batch `number`, of about equal size, or None if it is empty.

        The other items are also drawn, so that `data_sets` covers the whole batch, but they are not built. See `batch`.
        """
        drawn = self._draw_together(number)
        drawn_part = drawn[part * len(drawn) // parts : (part + 1) * len(drawn) // parts]
        return self._build_batch(drawn_part) if drawn_part else None

    def _draw_together(self, number: int) -> list[Drawn[BatchT]]:
        drawn = self.ranks.all_or_none(lambda: self._draw(number)) if self.can_fail else self._draw(number)
        self.data_sets = [self.components[which].name for which, _ in drawn]
        return [item for _, item in drawn]

    def locations(self, number: int) -> list[str]:
        """Return the location of every item of batch `number`, as file:line; "" for an item that has none."""
        drawn = [item for _, item in self._draw(number)]
        return [getattr(item.among, "location", lambda index: "")(item.index) for item in drawn]

    def distinct_batches(self, stop: int) -> Iterator[BatchT]:
        """Yield every item of the batches before batch `stop` exactly once, in batches, in the order of first use."""
        state, seen = self.state_dict(), set[Hashable]()
        self.load_state_dict({"batches": 0, "streams": {}})
        for number in range(stop):
            fresh = {(which, drawn.key): drawn for which, drawn in self._draw(number)}
            fresh = {key: drawn for key, drawn in fresh.items() if key not in seen}
            if fresh:
                yield self._build_batch(list(fresh.values()))
            seen.update(fresh)
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue with the next batch, as plain values."""
        states = {component.name: component.state_dict() for component in self.components}
        return {"batches": self._next, "streams": {name: state for name, state in states.items() if state is not None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`. Raise ConfigError if it has streamed data that this loader lacks."""
        names, streams = {component.name for component in self.components}, state["streams"]
        if unknown := sorted(set(streams) - names):
            raise ConfigError(
                f"the checkpoint has a position in the streamed data {unknown[0]}, which this run does not read; set "
                "data back to what it was, or choose another output_dir and start from the checkpoint with init_from"
            )
        for component in self.components:
            component.load_state_dict(streams.get(component.name))
        streamed = {component.name for component in self.components if component.state_dict() is not None}
        self._next = state["batches"] if streamed <= set(streams) else 0

    def _draw(self, number: int) -> list[tuple[int, Drawn[BatchT]]]:
        """Return the items of batch `number`, each with the index of its component."""
        if number < self._next:
            self.load_state_dict({"batches": 0, "streams": {}})
        drawn: list[tuple[int, Drawn[BatchT]]] = []
        first = self._next if self.is_streamed else number  # a stream must also draw the batches in between
        for drawn_number in range(first, number + 1):
            starts, counts = self.counts.at(drawn_number)
            drawn = [
                (which, item)
                for which, component in enumerate(self.components)
                for item in component.draw(starts[which], counts[which])
            ]
        self._next = number + 1
        if len(self.components) == 1:
            return drawn
        return [drawn[position] for position in epoch_order(len(drawn), f"{self.seed}/mixture", number).tolist()]

    def _build_batch(self, drawn: list[Drawn[BatchT]]) -> BatchT:
        """Return the batch of drawn items, in their order."""
        by_items: dict[int, tuple[Items[BatchT], list[int], list[int]]] = {}
        for position, item in enumerate(drawn):
            _, indices, positions = by_items.setdefault(id(item.among), (item.among, [], []))
            indices.append(item.index)
            positions.append(position)
        batches = [items.batch(indices) for items, indices, _ in by_items.values()]
        if len(batches) == 1:
            return batches[0]
        joined_positions = [position for _, _, positions in by_items.values() for position in positions]
        order = sorted(range(len(drawn)), key=joined_positions.__getitem__)
        return self.join(batches, order)
