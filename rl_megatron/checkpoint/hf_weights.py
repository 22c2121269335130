"""The weights of a Hugging Face directory: check that they fit the model, and load them into a sharded model.

Names, shapes and dtypes are checked from the files' headers, before a weight is read. Each rank reads only the rows
that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_megatron.checkpoint.hf_directory import INDEX, find_weight_files, read_directory
from rl_megatron.checkpoint.safetensors_files import NAMES, TensorLocation, WeightReader, read_header
from rl_megatron.checkpoint.training_state import HEAD_PREFIX
from rl_megatron.config.checkpoint_metadata import has_tokenizer
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.log import once
from rl_megatron.model.build import Head
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.score import build_score_table
from rl_megatron.model.families.table import Rows, Shape, WeightTable
from rl_megatron.model.families.with_images import is_of_images, text_name
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.model.shards import Piece, pieces

BLOCK_BYTES = 16 << 20  # how much of a tensor is read at a time
_SHOWN = 3  # how many tensors a message names
# RoPE frequencies, which old Llama files contain although every implementation computes them itself.
_NO_WEIGHT = ".rotary_emb.inv_freq"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def find_tensors(directory: Path) -> dict[str, TensorLocation]:
    """Return the location of every tensor from the headers of the weight files, which must agree with the index."""
    locations: dict[str, TensorLocation] = {}
    for file, indexed in find_weight_files(directory).items():
        in_file = read_header(directory / file)
        if indexed is not None:
            _refuse(indexed - in_file.keys(), f"{directory / file} lacks tensors that {INDEX} lists for it")
            _refuse(in_file.keys() - indexed, f"{directory / file} has tensors that {INDEX} does not place there")
        locations |= in_file
    return locations


def select_text_tensors(
    locations: Mapping[str, TensorLocation], family: Family, model: ModelConfig, where: str
) -> dict[str, TensorLocation]:
    """Return the location of every tensor by its name in the text model. Stacked experts are split into linears.

    `where` names the directory in messages, here and below.
    """
    single: dict[str, TensorLocation] = {}
    for hf_name, location in locations.items():
        name = hf_name if family.with_images is None else text_name(hf_name)
        stack = next((end for end in family.stacked_experts if name.endswith(f".{end}")), None)
        if stack is None or family.leaves_out(name, model):
            single[name] = location
        else:
            prefix = f"{name.removesuffix(stack)}{stack.rpartition('.')[0]}"
            single |= _split_experts(location, family.stacked_experts[stack], prefix, f"{where}: {hf_name}")
    return single


def _split_experts(stack: TensorLocation, linears: Sequence[str], prefix: str, what: str) -> dict[str, TensorLocation]:
    """Return the location of each linear of each expert in a tensor that stacks them, [experts, rows, columns]."""
    if len(stack.shape) != 3 or stack.shape[1] % len(linears):
        raise ConfigError(
            f"{what} has shape {stack.shape}; it must be [experts, rows, columns], with the rows of "
            f"{' above those of '.join(linears)}"
        )
    experts, rows, columns = stack.shape
    shape = (rows // len(linears), columns)
    size = math.prod(shape) * stack.dtype.itemsize
    numbered = ((expert, linear) for expert in range(experts) for linear in linears)
    return {
        f"{prefix}.{expert}.{linear}.weight": TensorLocation(stack.file, stack.start + index * size, stack.dtype, shape)
        for index, (expert, linear) in enumerate(numbered)
    }


def check_tensors(
    locations: Mapping[str, TensorLocation],
    table: WeightTable,
    where: str,
    is_dropped: Callable[[str], bool] = lambda name: False,
) -> torch.dtype:
    """Check that the files have exactly the tensors of `table`, with their shapes, and return their dtype.

    RoPE frequencies and the tensors that the family drops (`is_dropped`) are ignored, and logged once. If the head is
    tied to the embedding, the files may contain the head as well; the caller compares the two (`check_tied`).
    """
    extra = {name for name in locations.keys() - table.hf_shapes.keys() if name != find_tied_head(locations, table)}
    dropped = {name for name in extra if name.endswith(_NO_WEIGHT) or is_dropped(name)}
    if dropped:
        images = {name for name in dropped if is_of_images(name)}
        kinds = ((images, " that read images"), (dropped - images, " others" if images else ""))
        counts = (f"{len(names)}{kind}, such as {min(names)}" for names, kind in kinds if names)
        once(f"{where}: tensors that are not part of the text model are left out: {'; '.join(counts)}")
    _refuse(extra - dropped, f"{where} has tensors that its config.json does not ask for")
    _refuse(table.hf_shapes.keys() - locations.keys(), f"{where} lacks tensors that its config.json asks for")
    for name, shape in table.hf_shapes.items():
        if locations[name].shape != shape:
            raise ConfigError(f"{where}: {name} has shape {locations[name].shape}; its config.json asks for {shape}")
    free = {name: locations[name].dtype for name in table.hf_shapes if name not in table.fp32}
    first, dtype = next(iter(free.items()))
    for name, other in free.items():
        if other != dtype:
            raise ConfigError(
                f"{where}: {name} is {NAMES[other]} and {first} is {NAMES[dtype]}; all must have the same dtype"
            )
    for name in table.fp32:
        if locations[name].dtype not in (torch.float32, dtype):
            raise ConfigError(f"{where}: {name} is {NAMES[locations[name].dtype]}; it must be F32 or {NAMES[dtype]}")
    return dtype


def choose_block_height(columns: Shape, dtype: torch.dtype) -> int:
    """Return how many rows of the shape `columns` are read at a time."""
    return max(1, BLOCK_BYTES // max(1, math.prod(columns) * dtype.itemsize))


def read_block(reader: WeightReader, rows: Rows, first: int, into: torch.Tensor) -> None:
    """Fill `into` with `rows` of a Megatron tensor, beginning with the tensor's row `first`.

    `into` [rows, …] is contiguous and of the tensor's dtype.
    """
    hf_row = rows.hf_row + first - rows.row
    if rows.slab is None:
        reader.read_rows(rows.hf_name, hf_row, into)
    else:
        expert = reader.read_slab(rows.hf_name, rows.slab.expert)
        into.copy_(rows.slab.rows(expert)[hf_row : hf_row + len(into)])


def find_tied_head(locations: Mapping[str, TensorLocation], table: WeightTable) -> str | None:
    """Return the name of the head if it is tied to the embedding and the files contain it as well, or None."""
    return _HEAD if _HEAD in locations and _HEAD not in table.hf_shapes and _EMBEDDING in table.hf_shapes else None


def check_tied(reader: WeightReader, where: str) -> None:
    """Check that a tied model's head equals its embedding bit for bit."""
    head, embedding = reader.locations[_HEAD], reader.locations[_EMBEDDING]
    equal = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    rows = max(1, BLOCK_BYTES // max(1, embedding.row_bytes))
    for first in range(0, embedding.shape[0], rows) if equal else ():
        blocks = [
            torch.empty(min(rows, tensor.shape[0] - first), *tensor.shape[1:], dtype=tensor.dtype)
            for tensor in (head, embedding)
        ]
        for name, block in zip((_HEAD, _EMBEDDING), blocks, strict=True):
            reader.read_rows(name, first, block)
        equal = equal and torch.equal(*(block.view(torch.uint8) for block in blocks))
    if not equal:
        raise ConfigError(
            f"{where}: {_HEAD} differs from {_EMBEDDING}, but tie_word_embeddings=true says that they are the same; "
            "set it to false if the head has its own weights, or delete the head"
        )


def _refuse(names: Iterable[str], what: str) -> None:
    names = sorted(names)
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ConfigError(f"{what}: {', '.join(names[:_SHOWN])}{more}")


# --- loading ---


@dataclass(frozen=True)
class HuggingFaceWeights:
    """A Hugging Face directory whose config.json and tensors were checked against each other.

    Attributes:
        directory: The directory's path.
        model: The model section that its config.json describes. `vocab_size` is set.
        rows: The number of rows of its embedding.
        table: The weight table of its tensors.
        locations: The file and position of each of its tensors.
        tokenizer: The directory's tokenizer, or None if it has no tokenizer files.
        head: The head whose weights the files hold.
    """

    directory: Path
    model: ModelConfig
    rows: int
    table: WeightTable
    locations: dict[str, TensorLocation]
    tokenizer: Tokenizer | None
    head: Head = "lm"

    @property
    def vocab_size(self) -> int:
        """Return the number of valid token ids: the tokenizer's or, without a tokenizer, the embedding's rows."""
        return self.rows if self.tokenizer is None else self.tokenizer.vocab_size

    def refuse_other_tokens(self, tokenizer: Tokenizer) -> None:
        """Refuse the model if its own tokenizer is not `tokenizer`, or its embedding lacks a row for a token."""
        remedy = "serve this model and set url, because a server gets text, or choose a model with its tokenizer"
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

        Rows that pad the vocabulary become 0. No softmax includes them. A score head keeps its initial weights if the
        files are those of a language model.
        """
        model.mark_changed()  # before reading, because a read that fails may have changed some weights
        with WeightReader(self.locations) as reader:
            for piece in pieces(model.model_chunks):
                if model.head == self.head or not piece.name.startswith(HEAD_PREFIX):
                    _fill(piece, self.table.by_name[piece.name], reader)


def open_hugging_face(directory: Path, head: Head = "lm") -> HuggingFaceWeights:
    """Check a Hugging Face directory by the headers of its files, and return what is needed to load its weights.

    If the model ties its head to its embedding and the files have both, both are read and compared. If `head` is
    "score", the directory must have a reward model, which is a classifier with one label.
    """
    family, model = read_directory(directory, head)
    rows = require_vocab_size(model, directory / "config.json")
    table = family.table(model, rows)
    if head == "score":
        table = build_score_table(table, model.hidden_size)
    locations = select_text_tensors(find_tensors(directory), family, model, str(directory))
    check_tensors(locations, table, str(directory), lambda name: family.leaves_out(name, model))
    if find_tied_head(locations, table):
        with WeightReader(locations) as reader:
            check_tied(reader, str(directory))
    return HuggingFaceWeights(directory, model, rows, table, locations, _load_tokenizer(directory, model, rows), head)


def require_vocab_size(model: ModelConfig, config_file: Path) -> int:
    """Return the number of rows of the embedding that `config_file` describes."""
    if model.vocab_size is None:
        raise ConfigError(f"{config_file} has no vocab_size, which states how many rows the embedding has")
    return model.vocab_size


def _load_tokenizer(directory: Path, model: ModelConfig, rows: int) -> Tokenizer | None:
    """Return a directory's tokenizer, or None if it has no tokenizer files. Each token must have an embedding row."""
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
        dtype, shape = reader.locations[rows.hf_name].dtype, piece.global_shape[1:]
        height = choose_block_height(shape, dtype)
        low, high = max(begin, rows.row), min(end, rows.row + rows.count)
        for first in range(low, high, height):
            last = min(first + height, high)
            block = torch.empty(last - first, *shape, dtype=dtype)
            read_block(reader, rows, first, block)
            piece.tensor[first - begin : last - begin].copy_(block[(slice(None), *columns)])
