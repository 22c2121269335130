"""Datasets for pretraining, SFT and preference training. The same items always give the same batch.

`TextDataset` cuts a stream of tokens into windows (pretraining). `PromptAnswerDataset` has prompts and the answers to
learn, or conversations (SFT). `LabelledDataset` also has the labels of answers (KTO), and `PreferenceDataset` has pairs
of answers. Errors in the data are raised when a dataset is built, before the first step.

Keys of a batch: `input_ids` `[B, S]` int64, padded on the right; `input_lengths` `[B]` int64; `token_mask` `[B, S]`
fp32, entry t corresponds to token t; `sample_mask` `[B]` fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rl_megatron.data.answers import LABEL, check_labels, check_pair
from rl_megatron.data.batch import BatchedDataDict, Padding, span_mask
from rl_megatron.data.encoding import EncodedSequence, Limit, TooLong, apply_limit
from rl_megatron.data.records import NothingLeft, Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.token_cache import OFF, encode_documents, encode_examples, encode_pairs
from rl_megatron.data.tokenizer import Tokenizer


class Dataset(Protocol):
    """Items that become the sequences of a batch.

    Attributes:
        group_size: The number of sequences of an item: two for a preference pair.
    """

    group_size: int

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def item_lengths(self) -> Sequence[tuple[int, ...]]:
        """Return, for each item, the number of tokens of each of its sequences."""
        ...

    def batch(self, items: Sequence[int], /) -> BatchedDataDict:
        """Return the sequences of the items with these indices."""
        ...


class TextDataset:
    """Documents as one stream of tokens, `<eos> doc <eos> doc`, read in windows of `sequence_length` tokens.

    Window w is `stream[w·(S-1) : w·(S-1) + S]`: its first token is the last token of the previous window, and is not
    predicted again. So every token of the stream is predicted exactly once, except the first `<eos>`, which only serves
    as context. The summed NLL of all windows is therefore the NLL of the text. The last window is padded, and its
    padding is masked.

    Attributes:
        num_characters: The number of characters of the documents, which is the divisor of the NLL per character.
        num_bytes: The number of bytes of the documents in UTF-8.
        num_predicted_tokens: The number of tokens of the documents, with one `<eos>` between every two: Σ token_mask
            over all windows.
    """

    group_size = 1

    def __init__(
        self, documents: Sequence[str], tokenizer: Tokenizer, sequence_length: int, cache_dir: str | None = OFF
    ) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length = {sequence_length}: a window of fewer than 2 tokens predicts nothing.")
        self.num_characters = sum(map(len, documents))
        if self.num_characters == 0:
            raise NothingLeft("no text to train on: every document is empty.")
        self.num_bytes = sum(len(document.encode("utf-8")) for document in documents)
        self.sequence_length = sequence_length
        stream = encode_documents(documents, tokenizer, cache_dir)
        self.num_predicted_tokens = len(stream) - 1
        stride = sequence_length - 1
        num_windows = -(-self.num_predicted_tokens // stride)
        self._stream = torch.full((num_windows * stride + 1,), tokenizer.pad_id)
        self._stream[: len(stream)] = torch.tensor(stream.astype("int64"))

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self._stream) - 1) // (self.sequence_length - 1)

    def item_lengths(self) -> list[tuple[int]]:
        """Return for each window its number of tokens, padding included."""
        return [(self.sequence_length,)] * len(self)

    def batch(self, indices: Sequence[int]) -> BatchedDataDict:
        """Return the windows with these indices: `input_ids`, `input_lengths`, `token_mask`, `sample_mask`."""
        stride = self.sequence_length - 1
        windows = self._stream.unfold(0, self.sequence_length, stride)
        numbers = torch.tensor(list(indices), dtype=torch.long)
        lengths = (self.num_predicted_tokens + 1 - numbers * stride).clamp(max=self.sequence_length)
        return BatchedDataDict(
            input_ids=windows[numbers],
            input_lengths=lengths,
            token_mask=span_mask(torch.ones_like(lengths), lengths, self.sequence_length),
            sample_mask=torch.ones(len(numbers)),
        )


class PromptAnswerDataset:
    """Prompts with answers to learn, or conversations with turns to learn. `token_mask` is 1 on the tokens to learn.

    Args:
        records: Records of files, or a task's demonstrations as records.
        renderer: The renderer of the data section, which turns records into tokens.
        max_sequence_length: The maximum number of tokens in a sequence.
        too_long: What to do with a longer sequence. "error" raises an error. "drop" leaves it out. "truncate" cuts its
            end, and leaves it out if no token to learn remains. "drop" and "truncate" log how many are longer.
        pad_to_multiple_of: The width S of a batch is rounded up to a multiple of this.
    """

    group_size = 1

    def __init__(
        self,
        records: Sequence[Record],
        renderer: Renderer,
        max_sequence_length: int,
        *,
        too_long: TooLong = "error",
        pad_to_multiple_of: int = 1,
    ) -> None:
        limit = Limit(max_sequence_length, too_long)
        self._sequences = apply_limit(encode_examples(renderer, records), limit)
        self._padding = Padding(renderer.tokenizer.pad_id, pad_to_multiple_of)

    def __len__(self) -> int:
        return len(self._sequences)

    def item_lengths(self) -> list[tuple[int]]:
        """Return for each sequence its number of tokens, prompt and answer together."""
        return [(sequence.num_tokens,) for sequence in self._sequences]

    def location(self, index: int) -> str:
        """Return the location of a record, as file:line."""
        return self._sequences[index].record.location

    def batch(self, indices: Sequence[int]) -> BatchedDataDict:
        """Return the sequences with these indices: `input_ids`, `input_lengths`, `token_mask`, `sample_mask`."""
        return collate_sequences([self._sequences[index] for index in indices], self._padding)


def collate_sequences(sequences: Sequence[EncodedSequence], padding: Padding) -> BatchedDataDict:
    """Return the batch of `sequences`; `token_mask` is 1 on the tokens to learn."""
    batch = padding.collate([sequence.ids for sequence in sequences])
    width = batch["input_ids"].shape[1]
    trained = bytearray().join(sequence.trained.ljust(width, b"\x00") for sequence in sequences)
    batch["token_mask"] = torch.frombuffer(trained, dtype=torch.uint8).view(-1, width).float()
    return batch


class PreferenceDataset:
    """Pairs of answers to one prompt. One item is one pair, which becomes two sequences of a batch.

    `token_mask` is 1 on the tokens of the answers, including the token that ends each, and 0 on the prompt.

    Args:
        records: Records with `chosen` and `rejected`.
        renderer: The renderer of the data section, which turns records into tokens.
        max_sequence_length: The maximum number of tokens in each of the two sequences.
        too_long: What to do with a pair that has a longer sequence. "error" raises an error. "drop" leaves the pair
            out. "truncate" cuts the end of each longer sequence, and leaves the pair out if either answer has no token
            left or the two answers become equal. "drop" and "truncate" log how many pairs are longer.
    """

    group_size = 2

    def __init__(
        self,
        records: Sequence[Record],
        renderer: Renderer,
        max_sequence_length: int,
        *,
        too_long: TooLong = "error",
    ) -> None:
        for record in records:
            check_pair(record)
        limit = Limit(max_sequence_length, too_long, noun="pair")
        self._pairs = apply_limit(encode_pairs(renderer, records), limit)
        self._padding = Padding(renderer.tokenizer.pad_id, multiple=1)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._pairs)

    def item_lengths(self) -> list[tuple[int, int]]:
        """Return for each pair the numbers of tokens of its two sequences, prompt and answer together."""
        return [(pair.chosen.num_tokens, pair.rejected.num_tokens) for pair in self._pairs]

    def location(self, index: int) -> str:
        """Return the location of a pair's record, as file:line."""
        return self._pairs[index].record.location

    def batch(self, pairs: Sequence[int]) -> BatchedDataDict:
        """Return two sequences per pair: chosen ones at 0, 2, 4, … and rejected ones at 1, 3, 5, ….

        The keys are `input_ids` [2P, S], `input_lengths`, `token_mask` and `sample_mask`.
        """
        sequences = [
            sequence for number in pairs for sequence in (self._pairs[number].chosen, self._pairs[number].rejected)
        ]
        return collate_sequences(sequences, self._padding)


class LabelledDataset(PromptAnswerDataset):
    """Prompts with one answer each, as in `PromptAnswerDataset`, and the labels of the answers.

    Attributes:
        num_desirable: The number of desirable answers.
    """

    def __init__(
        self, records: Sequence[Record], renderer: Renderer, max_sequence_length: int, *, too_long: TooLong = "error"
    ) -> None:
        check_labels(records)
        super().__init__(records, renderer, max_sequence_length, too_long=too_long)
        self._desirable = torch.tensor([float(sequence.record.values[LABEL]) for sequence in self._sequences])
        self.num_desirable = int(self._desirable.sum())

    def batch(self, indices: Sequence[int]) -> BatchedDataDict:
        """Return the sequences with these indices, with `desirable` [B] fp32: 1 if the label is true, otherwise 0."""
        batch = super().batch(indices)
        batch["desirable"] = self._desirable[list(indices)]
        return batch
