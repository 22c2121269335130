"""Loading the weights of a Hugging Face directory into a sharded model. Each rank reads only the rows that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_megatron.checkpoint.hf_directory import read_directory
from rl_megatron.checkpoint.hf_weights import (
    block_height,
    check_tensors,
    check_tied,
    find_tensors,
    read_block,
    text_tensors,
    tied_head,
)
from rl_megatron.checkpoint.safetensors_files import Place, WeightReader
from rl_megatron.checkpoint.training_state import HEAD_PREFIX
from rl_megatron.config.checkpoint_metadata import has_tokenizer
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.model.build import Head
from rl_megatron.model.families.score import score_table
from rl_megatron.model.families.table import Rows, WeightTable
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.model.shards import Piece, pieces


@dataclass(frozen=True)
class HuggingFaceWeights:
    """A Hugging Face directory whose config.json and tensors were checked against each other.

    Attributes:
        directory: The directory's path.
        model: The model section that its config.json describes. `vocab_size` is set.
        rows: The number of rows of its embedding.
        table: The Megatron tensor and row to which each row of its tensors belongs.
        places: The file and position of each of its tensors.
        tokenizer: The tokenizer beside the weights, or None.
        head: The head that the files have.
    """

    directory: Path
    model: ModelConfig
    rows: int
    table: WeightTable
    places: dict[str, Place]
    tokenizer: Tokenizer | None
    head: Head = "lm"

    @property
    def vocab_size(self) -> int:
        """Return the number of valid token ids: the tokenizer's or, without a tokenizer, the embedding's rows."""
        return self.rows if self.tokenizer is None else self.tokenizer.vocab_size

    def refuse_other_tokens(self, tokenizer: Tokenizer) -> None:
        """Check that the model reads the tokens of a tokenizer.

        Raises:
            ConfigError: It has another tokenizer, or without one its embedding has too few rows.
        """
        remedy = "serve it and set url, because a server gets text, or choose a model with the policy's tokenizer"
        if self.tokenizer is not None and self.tokenizer.digest != tokenizer.digest:
            raise ConfigError(
                f"{self.directory} has another tokenizer than the policy, so the same text has other tokens; {remedy}"
            )
        if self.rows < tokenizer.vocab_size:
            raise ConfigError(
                f"{self.directory} has an embedding of {self.rows} rows, and the policy's tokenizer has "
                f"{tokenizer.vocab_size} tokens; {remedy}"
            )

    def load_into(self, model: ShardedModel) -> None:
        """Fill this rank's part of a model built from `self.model`, under any parallel layout.

        Rows that pad the vocabulary become 0. No softmax includes them. A score head keeps its new weights if the
        files are a language model's.

        Raises:
            OSError: A file is shorter than it was when it was checked.
        """
        model.mark_changed()  # even if reading fails: some weights may have changed by then
        with WeightReader(self.places) as reader:
            for piece in pieces(model.model_chunks):
                if model.head == self.head or not piece.name.startswith(HEAD_PREFIX):
                    _fill(piece, self.table.of_megatron[piece.name], reader)


def open_hugging_face(directory: Path, head: Head = "lm") -> HuggingFaceWeights:
    """Check a Hugging Face directory and return what is needed to load its weights. Only file headers are read.

    If the model ties its head to its embedding and the files have both, both are read and compared.

    Args:
        directory: The directory.
        head: "lm" for a language model, "score" for a classifier of one label, which is a reward model.

    Raises:
        ConfigError: The architecture is unknown, or a tensor is missing, unknown, or has another shape or dtype than
            config.json asks for. The message names it.
    """
    family, model = read_directory(directory, head)
    rows = embedding_rows(model, directory / "config.json")
    table = family.table(model, rows) if head == "lm" else score_table(family.table(model, rows), model.hidden_size)
    places = text_tensors(find_tensors(directory), family, model, str(directory))
    check_tensors(places, table, str(directory), lambda name: family.leaves_out(name, model))
    if tied_head(places, table):
        with WeightReader(places) as reader:
            check_tied(reader, str(directory))
    return HuggingFaceWeights(directory, model, rows, table, places, _tokenizer_of(directory, model, rows), head)


def embedding_rows(model: ModelConfig, config_file: Path) -> int:
    """Return the number of rows of the embedding that `config_file` describes.

    Raises:
        ConfigError: The file does not state it.
    """
    if model.vocab_size is None:
        raise ConfigError(f"{config_file} has no vocab_size, which states how many rows the embedding has")
    return model.vocab_size


def _tokenizer_of(directory: Path, model: ModelConfig, rows: int) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face directory, or None. Every token has a row in the embedding."""
    if not has_tokenizer(directory):
        return None
    try:
        tokenizer = load_tokenizer(directory)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{directory}: its tokenizer cannot be read: {error}") from error
    tokenizer.leave_out_special_tokens_from(rows)
    check_vocabulary(model, tokenizer.vocab_size)
    return tokenizer


@torch.no_grad()
def _fill(piece: Piece, sources: Sequence[Rows], reader: WeightReader) -> None:
    """Fill this rank's piece of a Megatron tensor with the rows of Hugging Face tensors that belong there."""
    begin, end = piece.offset[0], piece.offset[0] + piece.tensor.size(0)
    columns = tuple(slice(o, o + n) for o, n in zip(piece.offset[1:], piece.tensor.shape[1:], strict=True))
    piece.tensor.zero_()
    for rows in sources:
        dtype, shape = reader.places[rows.hf_name].dtype, piece.global_shape[1:]
        height = block_height(shape, dtype)
        low, high = max(begin, rows.row), min(end, rows.row + rows.count)
        for first in range(low, high, height):
            last = min(first + height, high)
            block = torch.empty(last - first, *shape, dtype=dtype)
            read_block(reader, rows, first, block)
            piece.tensor[first - begin : last - begin].copy_(block[(slice(None), *columns)])
