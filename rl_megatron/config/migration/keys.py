"""What a row of a table of another library's keys says, and the conversions that several tables use."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# The settings of a file: its values by their dotted keys, with the library's defaults.
Settings = Mapping[str, Any]
# A conversion returns the keys here with their values, a sentence if the value has no counterpart, keys and a sentence
# if they only come close, or None if nothing needs to be set.
Converted = Mapping[str, object] | str | tuple[Mapping[str, object], str] | None
Convert = Callable[[Any, Settings], Converted]


@dataclass(frozen=True)
class Expression:
    """A value that a file computes, and that is not known before it runs."""

    text: str

    def __repr__(self) -> str:
        return self.text


class _Everything:
    """A container of all values."""

    def __contains__(self, value: object) -> bool:
        return True


@dataclass(frozen=True)
class Key:
    """A key of another library.

    Attributes:
        here: The keys that it sets here, the most important one first. Empty: it has no counterpart.
        note: How its meaning differs or, if it has no counterpart, why, and what to do instead.
        convert: The conversion of its value. None: the value of the only key in `here` is the same.
        unused: Values for which nothing is set and nothing is reported.
        is_translated: Whether a value of it can become a value of `here`. False: `here` are keys to set by hand.
    """

    here: tuple[str, ...] = ()
    note: str = ""
    convert: Convert | None = None
    unused: Container[object] = (None,)
    is_translated: bool = True

    @property
    def is_automatic(self) -> bool:
        """Return whether nothing has to be set for any value of it, and no key here has its meaning."""
        return isinstance(self.unused, _Everything) and not self.here

    def translate(self, value: Any, settings: Settings) -> Converted:
        """Return what `convert` does: keys here, a sentence, both, or None."""
        if value in self.unused:
            return None
        by_hand = f"set {' or '.join(self.here)}" if self.here else self.note
        if isinstance(value, Expression):
            return f"the file computes this value; {by_hand}"
        if self.convert is not None:
            try:
                return self.convert(value, settings)
            except (TypeError, ValueError, LookupError, AttributeError):  # it, or a value beside it, has another type
                return f"this value, or one that it is read with, is computed or of an unknown form; {by_hand}"
        return {self.here[0]: value} if self.here else self.note


@dataclass(frozen=True)
class Library:
    """The table of a library.

    Attributes:
        name: Its name, for messages and comments.
        keys: Its keys. A key that ends in `*` stands for all keys with this beginning that have no row.
        defaults: Its values of keys that a file leaves out, where a default here differs.
        sections: Keys that are only names, such as sections that choose the algorithm.
        find_unread: Return the beginnings of keys that these settings do not use, with the reason.
    """

    name: str
    keys: Mapping[str, Key]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sections: Container[str] = ()
    find_unread: Callable[[Settings], Mapping[str, str]] = lambda settings: {}

    def find(self, key: str) -> Key | None:
        """Return the row of a key, or None if the table has none."""
        if key in self.keys:
            return self.keys[key]
        beginnings = (name for name in self.keys if name.endswith("*") and key.startswith(name[:-1]))
        longest = max(beginnings, key=len, default=None)
        return None if longest is None else self.keys[longest]


def copy(here: str, note: str = "", unused: Container[object] = (None,)) -> Key:
    """Return a key whose value is the same here."""
    return Key((here,), note, unused=unused)


def report(note: str, *unused: object, here: tuple[str, ...] = ()) -> Key:
    """Return a key that cannot be translated. `here` are keys to set by hand; values in `unused` change nothing."""
    return Key(here, note, lambda value, settings: note, (None, *unused), is_translated=False)


def ignore(note: str, *here: str) -> Key:
    """Return a key that needs no counterpart, because it changes no result or is always as wanted."""
    return Key(here, note, unused=_Everything())


def ignore_each(prefix: str, names: str, note: str = "it is decided here, or changes no result") -> dict[str, Key]:
    """Return keys that need no counterpart; `names` are separated by spaces."""
    return {f"{prefix}{name}": ignore(note) for name in names.split()}


def keep_checkpoints(note: str = "") -> Key:
    """Return a key with a number of checkpoints. All are kept if it is not a positive number."""
    convert = lambda value, settings: {"train.keep_checkpoints": value if value and value > 0 else 10**6}  # noqa: E731
    return Key(("train.keep_checkpoints",), note, convert, ())


def read_with(other: str, *here: str) -> Key:
    """Return a key that the conversion of another key reads."""
    return Key(here, f"read with `{other}`", unused=_Everything())


def rename(here: str, choices: Mapping[Any, object], note: str = "") -> Key:
    """Return a key with other names of the same values. A choice of None needs no key; others are reported."""
    names = ", ".join(map(str, choices))

    def convert(value: Any, settings: Settings) -> Converted:
        if value not in choices:
            return f"{here} has no such choice; these have a counterpart: {names}"
        return None if choices[value] is None else {here: choices[value]}

    return Key((here,), note, convert)


def if_true(here: Mapping[str, object], note: str = "") -> Key:
    """Return a switch that sets these keys if it is true, and none if it is false."""
    return Key(tuple(here), note, lambda value, settings: here if value else None)


def compute(here: str, convert: Callable[[Any, Settings], object], note: str = "") -> Key:
    """Return a key whose value here is computed from its value and the other settings."""
    return Key((here,), note, lambda value, settings: {here: convert(value, settings)})


def only_if(other: str, wanted: object, key: Key) -> Key:
    """Return a key that has an effect only if another key has the value `wanted`."""

    def convert(value: Any, settings: Settings) -> Converted:
        return key.translate(value, settings) if settings.get(other) == wanted else None

    return replace(key, convert=convert)


def name_checkpoint(model: object) -> str:
    """Return the directory of the checkpoint that `rl-megatron convert import` makes of a model."""
    return f"checkpoints/{str(model).rstrip('/').rpartition('/')[2]}"


def name_model() -> Key:
    """Return a key with the Hugging Face name or directory of the model that is trained."""
    here, note = ("init_from", "model"), "first `rl-megatron convert import`"
    return Key(here, note, lambda value, settings: {"model": "init_from", "init_from": name_checkpoint(value)})


def report_epochs() -> Key:
    """Return a key that counts epochs."""
    note = "a stage ends after `train.steps`: multiply the epochs by the records, and divide by those of a step"
    return report(note, here=("train.steps",))
