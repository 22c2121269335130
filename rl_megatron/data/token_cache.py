"""Cache the tokens of data: on disk for large data, otherwise in memory.

If the same dataset is built again, its tokens come from the cache: after the preflight and, for large data, on another
rank or in a later run. The key of an entry, which is also its directory's name, is a digest of the text, the tokenizer,
the rendering settings and the code's versions. So an entry is never updated, and can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import tokenizers

from rl_megatron import __version__, disk, log
from rl_megatron.data.chat_template import read_template
from rl_megatron.data.encoding import EncodedPair, EncodedSequence
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.tasks.task import TaskRecord
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.log import track

OFF = "off"  # the value of data.cache_dir that keeps nothing
_FORMAT = 4
_RENDERING = (
    "format prompt_template answer_template system_prompt chat_template chat_template_kwargs trained_turns".split()
)
_ARRAYS = ("ids", "trained", "ends")


def encode_examples(renderer: Renderer, records: Sequence[Record]) -> list[EncodedSequence]:
    """Return the sequence of every record, as `renderer.encode_example` makes it."""
    return _encode_records(renderer, records, "examples", lambda record: [renderer.encode_example(record)])


def encode_pairs(renderer: Renderer, records: Sequence[Record]) -> list[EncodedPair]:
    """Return the pair of every record, as `renderer.encode_pair` makes it."""

    def sides(record: Record) -> list[EncodedSequence]:
        pair = renderer.encode_pair(record)
        return [pair.chosen, pair.rejected]

    sequences = _encode_records(renderer, records, "pairs", sides)
    return [EncodedPair(*sequences[index : index + 2]) for index in range(0, len(sequences), 2)]


def encode_prompts(renderer: Renderer, records: Sequence[Record]) -> list[list[int]]:
    """Return the tokens of the prompt of every record, as `renderer.encode_prompt` makes them."""

    def prompt(record: Record) -> list[EncodedSequence]:
        return [EncodedSequence(renderer.encode_prompt(record), b"", record)]

    return [sequence.ids for sequence in _encode_records(renderer, records, "rollout prompts", prompt)]


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer, cache_dir: str | None) -> np.ndarray:
    """Return the tokens `<eos> doc <eos> doc …` of documents, [N] int32."""

    def encode() -> _Tokens:
        parts = [
            np.asarray([tokenizer.eos_id, *tokenizer.encode(document)], np.int32)
            for document in track(documents, "tokenized documents", len(documents))
        ]
        ids = np.concatenate(parts)
        return _Tokens(ids, np.zeros(0, np.uint8), np.cumsum([len(part) for part in parts]))

    key = _digest([["documents", *_describe_tokenizer(tokenizer)], *documents])
    return CACHE.get(key, sum(map(len, documents)), cache_dir, len(documents), encode).ids


@dataclass(frozen=True)
class _Tokens:
    """Sequences one after the other: `ids` [N] int32, `trained` [N] uint8 or empty, and their `ends` [B] int64."""

    ids: np.ndarray
    trained: np.ndarray
    ends: np.ndarray


class TokenCache:
    """A cache of tokens: on disk for large texts, otherwise in memory, where the least recently used are dropped."""

    def __init__(self, smallest: int = 4 * 2**20, most_in_memory: int = 16):
        """Initialize an empty cache.

        Args:
            smallest: The size, in characters, of the smallest text whose tokens are kept on disk.
            most_in_memory: The maximum number of data sets in memory; each has a few MiB at most.
        """
        self._smallest, self._most_in_memory = smallest, most_in_memory
        self._in_memory: OrderedDict[str, _Tokens] = OrderedDict()  # by key, the most recently used last

    def get(self, key: str, size: int, cache_dir: str | None, count: int, make: Callable[[], _Tokens]) -> _Tokens:
        """Return the tokens under a key; make and keep them if they are missing.

        Args:
            key: The key.
            size: The size of the text, which decides whether its tokens are kept in memory or on disk.
            cache_dir: The directory on disk, as `data.cache_dir`.
            count: The number of sequences.
            make: Makes the tokens.
        """
        if size >= self._smallest:
            return _keep_on_disk(_find_directory(cache_dir, key), count, make)
        if key not in self._in_memory:
            self._in_memory[key] = make()
            if len(self._in_memory) > self._most_in_memory:
                self._in_memory.popitem(last=False)
        self._in_memory.move_to_end(key)
        return self._in_memory[key]


CACHE = TokenCache()  # of this process


class _Mapped(EncodedSequence):
    """A sequence whose tokens stay in arrays, which may be memory-mapped files, until a batch is made."""

    def __init__(self, tokens: _Tokens, start: int, stop: int, record: Record) -> None:
        for name, value in {"tokens": tokens, "start": start, "stop": stop, "record": record}.items():
            object.__setattr__(self, name, value)

    tokens: _Tokens
    start: int
    stop: int

    @property
    def ids(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride]  # a field of the base class
        """Return the token ids."""
        return self.tokens.ids[self.start : self.stop].tolist()

    @property
    def trained(self) -> bytes:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return one byte per token, 1 if the token is trained on."""
        return self.tokens.trained[self.start : self.stop].tobytes()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start

    def truncate(self, limit: int) -> EncodedSequence | None:
        """Return the first `limit` tokens, or None if none of them is trained on."""
        return EncodedSequence(self.ids, self.trained, self.record).truncate(limit)


def _encode_records(
    renderer: Renderer, records: Sequence[Record], kind: str, encode: Callable[[Record], list[EncodedSequence]]
) -> list[EncodedSequence]:
    """Return the sequences of all records, the same number for each record."""
    if not records:
        return []
    texts = [serialize_record(record) for record in records]
    per_record = len(encode(records[0]))  # this call also chooses and logs the records' format
    key = _digest([[kind, *_describe_tokenizer(renderer.tokenizer), *_describe_rendering(renderer)], *texts])

    def make() -> _Tokens:
        sequences = [
            sequence for record in track(records, "tokenized records", len(records)) for sequence in encode(record)
        ]
        ids = np.concatenate([np.asarray(sequence.ids, np.int32) for sequence in sequences])
        trained = np.array(bytearray().join(sequence.trained for sequence in sequences), np.uint8)
        return _Tokens(ids, trained, np.cumsum([sequence.num_tokens for sequence in sequences]))

    tokens = CACHE.get(key, sum(map(len, texts)), renderer.data.cache_dir, len(records) * per_record, make)
    bounds = [0, *tokens.ends.tolist()]
    return [
        _Mapped(tokens, start, stop, records[number // per_record])
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]


def serialize_record(record: Record) -> str:
    """Return, as JSON, everything in a record that its tokens may depend on."""
    # The fields `prompt` and `answer` may differ from the task's own prompt and answer.
    task_texts = [record.prompt, record.answer] if isinstance(record, TaskRecord) else []
    return json.dumps([record.values, *task_texts], ensure_ascii=False, default=str, skipkeys=True)


def _describe_tokenizer(tokenizer: Tokenizer) -> list[object]:
    return [
        _FORMAT, __version__, tokenizers.__version__, tokenizer.digest, tokenizer.eos_id, tokenizer.prefix_ids,
        tokenizer.vocab_size, tokenizer.chat_templates, tokenizer.named_tokens,
    ]  # fmt: skip


def _describe_rendering(renderer: Renderer) -> list[object]:
    data = renderer.data
    template = None if data.chat_template is None else read_template(data.chat_template)
    # A template may write the date into a system message, so its tokens are valid for one day.
    today = date.today().isoformat() if "strftime" in f"{template}{renderer.tokenizer.chat_templates}" else None
    return [template, today, {key: getattr(data, key) for key in _RENDERING}]


def _digest(parts: Sequence[object]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part, sort_keys=True, default=str)
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _find_directory(cache_dir: str | None, key: str) -> Path | None:
    """Return the directory of an entry, or None if `cache_dir` turns the cache off."""
    if cache_dir == OFF:
        return None
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / key
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_megatron" / "tokens" / key


def _keep_on_disk(directory: Path | None, count: int, make: Callable[[], _Tokens]) -> _Tokens:
    """Return the tokens in the directory, or make them and write them there. If it is None, only make them."""
    kept = None if directory is None else _read(directory, count)
    if kept is not None or directory is None:
        return make() if kept is None else kept
    tokens = make()
    try:
        _write(directory, tokens)
    except OSError as error:
        reason = disk.describe(error, directory)
        log.once(f"tokens cannot be kept in {directory.parent} ({reason}); set data.cache_dir, or data.cache_dir={OFF}")
        return tokens
    return _read(directory, count) or tokens


def _read(directory: Path, count: int) -> _Tokens | None:
    """Return the tokens of an entry, mapped into memory, or None if it is missing or damaged. Delete a damaged one."""
    if not directory.is_dir():
        return None
    try:
        tokens = _Tokens(*(np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS))
        recorded = (directory / "digest").read_text()
        if len(tokens.ends) != count or _digest_tokens(tokens) != recorded:
            raise ValueError("its content has changed")
    except (OSError, ValueError, EOFError) as error:
        log.LOGGER.warning("the tokens in %s cannot be used (%s); they are made again", directory, error)
        shutil.rmtree(directory, ignore_errors=True)
        return None
    log.LOGGER.info("tokens are read from %s", directory)
    return tokens


def _write(directory: Path, tokens: _Tokens) -> None:
    """Write an entry atomically, even if several ranks write it at the same time."""
    partial = directory.with_name(f"{directory.name}.{os.uname().nodename}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        for name in _ARRAYS:
            np.save(partial / f"{name}.npy", getattr(tokens, name))
        (partial / "digest").write_text(_digest_tokens(tokens))
        partial.rename(directory)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not directory.is_dir():  # another rank was faster
            raise


def _digest_tokens(tokens: _Tokens) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for name in _ARRAYS:
        digest.update(np.ascontiguousarray(getattr(tokens, name)).data)
    return digest.hexdigest()
