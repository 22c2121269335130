"""Checks of a Hugging Face directory's weights: which tensors it has, and whether they fit the model.

Names, shapes and dtypes are checked from the files' headers, before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from rl_megatron.checkpoint.hf_directory import INDEX, weight_files
from rl_megatron.checkpoint.safetensors_files import NAMES, Place, WeightReader, read_header
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.log import once
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.table import Rows, Shape, WeightTable
from rl_megatron.model.families.with_images import is_of_images, text_name

BLOCK_BYTES = 16 << 20  # how much of a tensor is read at a time
_SHOWN = 3  # how many tensors a message names
# RoPE frequencies, which old Llama files contain although every implementation computes them itself.
_NO_WEIGHT = ".rotary_emb.inv_freq"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def find_tensors(directory: Path) -> dict[str, Place]:
    """Return the place of every tensor in the directory, from its index or from its only file.

    Raises:
        ConfigError: A file is missing, truncated or not in the format, or the index and the files list different
            tensors. The message names the file or the tensors.
    """
    places: dict[str, Place] = {}
    for file, indexed in weight_files(directory).items():
        found = read_header(directory / file)
        if indexed is not None:
            _refuse(indexed - found.keys(), f"{directory / file} lacks tensors that {INDEX} says it has")
            _refuse(found.keys() - indexed, f"{directory / file} has tensors that {INDEX} does not place there")
        places |= found
    return places


def text_tensors(places: Mapping[str, Place], family: Family, model: ModelConfig, where: str) -> dict[str, Place]:
    """Return the places of all tensors, with the text model's under its own names, and one for each expert's linear.

    Args:
        places: The place of every tensor in the files.
        family: The model's family.
        model: The text model.
        where: The directory, for messages.

    Raises:
        ConfigError: A tensor that stacks experts has no such shape. The message names it.
    """
    single: dict[str, Place] = {}
    for hf_name, place in places.items():
        name = hf_name if family.with_images is None else text_name(hf_name)
        stack = next((end for end in family.stacked_experts if name.endswith(f".{end}")), None)
        if stack is None or family.leaves_out(name, model):
            single[name] = place
        else:
            prefix = f"{name.removesuffix(stack)}{stack.rpartition('.')[0]}"
            single |= _experts_of(place, family.stacked_experts[stack], prefix, f"{where}: {hf_name}")
    return single


def _experts_of(stack: Place, linears: Sequence[str], prefix: str, what: str) -> dict[str, Place]:
    """Return the place of each linear of each expert in a tensor that stacks them, [experts, rows, columns]."""
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
        f"{prefix}.{expert}.{linear}.weight": Place(stack.file, stack.start + index * size, stack.dtype, shape)
        for index, (expert, linear) in enumerate(numbered)
    }


def check_tensors(
    places: Mapping[str, Place],
    table: WeightTable,
    where: str,
    is_dropped: Callable[[str], bool] = lambda name: False,
) -> torch.dtype:
    """Check that the files have the tensors of `table`, with their shapes and no others, and return their dtype.

    RoPE frequencies and the tensors that the family drops are left out with a log line. If the head is tied to the
    embedding, the files may contain the head as well; the caller compares the two (`check_tied`).

    Args:
        places: The place of every tensor in the files.
        table: The model's weight table.
        where: The directory, for messages.
        is_dropped: Whether a tensor, by its name, is not part of the model.

    Raises:
        ConfigError: A tensor is missing, unknown, or has another shape or dtype. The message names it.
    """
    extra = {name for name in places.keys() - table.hf_shapes.keys() if name != tied_head(places, table)}
    dropped = {name for name in extra if name.endswith(_NO_WEIGHT) or is_dropped(name)}
    if dropped:
        images = {name for name in dropped if is_of_images(name)}
        kinds = ((images, " that read images"), (dropped - images, " others" if images else ""))
        counts = (f"{len(names)}{kind}, such as {min(names)}" for names, kind in kinds if names)
        once(f"{where}: left out are tensors that are not part of the text model: {'; '.join(counts)}")
    _refuse(extra - dropped, f"{where} has tensors that its config.json does not ask for")
    _refuse(table.hf_shapes.keys() - places.keys(), f"{where} lacks tensors that its config.json asks for")
    for name, shape in table.hf_shapes.items():
        if places[name].shape != shape:
            raise ConfigError(f"{where}: {name} has shape {places[name].shape}; its config.json asks for {shape}")
    free = {name: places[name].dtype for name in table.hf_shapes if name not in table.fp32}
    first, dtype = next(iter(free.items()))
    for name, other in free.items():
        if other != dtype:
            raise ConfigError(
                f"{where}: {name} is {NAMES[other]} and {first} is {NAMES[dtype]}; all must have the same dtype"
            )
    for name in table.fp32:
        if places[name].dtype not in (torch.float32, dtype):
            raise ConfigError(f"{where}: {name} is {NAMES[places[name].dtype]}; it must be F32 or {NAMES[dtype]}")
    return dtype


def block_height(columns: Shape, dtype: torch.dtype) -> int:
    """Return how many rows with these columns are read at a time."""
    return max(1, BLOCK_BYTES // max(1, math.prod(columns) * dtype.itemsize))


def read_block(reader: WeightReader, rows: Rows, first: int, into: torch.Tensor) -> None:
    """Fill `into` with rows of a Megatron tensor, from its row `first` on.

    Args:
        reader: The reader of the Hugging Face tensors.
        rows: The block of rows that has them.
        first: The number of the first row in the Megatron tensor.
        into: [rows, …], contiguous and of the tensor's dtype.
    """
    hf_row = rows.hf_row + first - rows.row
    if rows.slab is None:
        reader.read_rows(rows.hf_name, hf_row, into)
    else:
        of_expert = reader.slab(rows.hf_name, rows.slab.expert)
        into.copy_(rows.slab.rows(of_expert)[hf_row : hf_row + len(into)])


def tied_head(places: Mapping[str, Place], table: WeightTable) -> str | None:
    """Return the name of the head if it is tied to the embedding and the files contain it as well, or None."""
    return _HEAD if _HEAD in places and _HEAD not in table.hf_shapes and _EMBEDDING in table.hf_shapes else None


def check_tied(reader: WeightReader, where: str) -> None:
    """Check that a tied model's head equals its embedding bit for bit.

    Raises:
        ConfigError: They differ.
    """
    head, embedding = reader.places[_HEAD], reader.places[_EMBEDDING]
    equal = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    rows = max(1, BLOCK_BYTES // max(1, embedding.row_bytes))
    for first in range(0, embedding.shape[0], rows) if equal else ():
        blocks = [
            torch.empty(min(rows, place.shape[0] - first), *place.shape[1:], dtype=place.dtype)
            for place in (head, embedding)
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
