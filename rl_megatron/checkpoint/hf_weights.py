"""The weights of a Hugging Face directory: which tensors it has, and whether they are a model's, before one is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_megatron.checkpoint.safetensors_files import INDEX, NAMES, SINGLE, Place, WeightReader, read_header
from rl_megatron.config.errors import ConfigError
from rl_megatron.log import once
from rl_megatron.model.families.table import WeightTable

BLOCK_BYTES = 16 << 20  # read at once
_SHOWN = 3  # tensors named in a message
# Frequencies of RoPE, which old Llama files carry and every reader computes for itself.
_NO_WEIGHT = ".rotary_emb.inv_freq"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def find_tensors(directory: Path) -> dict[str, Place]:
    """Every tensor of the directory: those of its index, or of its one file.

    Raises: ConfigError naming the file that is missing, cut or not in the format, or the tensor that the index has and
        the files have not, or the other way round.
    """
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file() and single.is_file():
        raise ConfigError(f"{directory} has both {INDEX} and {SINGLE}: which are its weights? Take one of them away")
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise ConfigError(
            f"{directory} has neither {SINGLE} nor {INDEX}; weights are read in the safetensors format only"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index} has no weight_map, which tells the file of each tensor")
    places: dict[str, Place] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ConfigError(f"{index} names a file of another directory, {file}; its files must lie beside it")
        if not (directory / file).is_file():
            raise ConfigError(f"{directory / file} is missing, which {INDEX} names; download it again")
        found = read_header(directory / file)
        indexed = {name for name, its_file in weight_map.items() if its_file == file}
        _refuse(indexed - found.keys(), f"{directory / file} lacks tensors that {INDEX} says it has")
        _refuse(found.keys() - indexed, f"{directory / file} has tensors that {INDEX} does not place there")
        places |= found
    return places


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ConfigError naming a file that is missing, or is not a JSON object."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; give a Hugging Face directory") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return values


def check_tensors(
    places: Mapping[str, Place],
    table: WeightTable,
    where: str,
    is_dropped: Callable[[str], bool] = lambda name: False,
) -> torch.dtype:
    """The dtype that all tensors have, after each of `table` was found, with its shape, and no other.

    Frequencies of RoPE, and what the family says is no part of the model (`is_dropped`), are left out with a notice.

    A model whose head is its embedding may carry the head all the same: it is the caller's to compare them.

    Raises: ConfigError naming tensors that are missing, unknown, of another shape or of another dtype.
    """
    extra = {name for name in places.keys() - table.hf_shapes.keys() if name != tied_head(places, table)}
    dropped = {name for name in extra if name.endswith(_NO_WEIGHT) or is_dropped(name)}
    if dropped:
        once(f"{where}: {len(dropped)} tensors are no part of the model and left out, such as {min(dropped)}")
    _refuse(extra - dropped, f"{where} has tensors that its config.json has no place for")
    _refuse(table.hf_shapes.keys() - places.keys(), f"{where} lacks tensors that its config.json asks for")
    for name, shape in table.hf_shapes.items():
        if places[name].shape != shape:
            raise ConfigError(f"{where}: {name} has shape {places[name].shape}; its config.json asks for {shape}")
    free = {name: places[name].dtype for name in table.hf_shapes if name not in table.fp32}
    first, dtype = next(iter(free.items()))
    for name, other in free.items():
        if other != dtype:
            raise ConfigError(
                f"{where}: {name} is {NAMES[other]} and {first} is {NAMES[dtype]}; all must be of one dtype"
            )
    for name in table.fp32:
        if places[name].dtype not in (torch.float32, dtype):
            raise ConfigError(f"{where}: {name} is {NAMES[places[name].dtype]}; it must be F32 or {NAMES[dtype]}")
    return dtype


def tied_head(places: Mapping[str, Place], table: WeightTable) -> str | None:
    """The head of a model whose head is its embedding, where the files have it as well."""
    return _HEAD if _HEAD in places and _HEAD not in table.hf_shapes and _EMBEDDING in table.hf_shapes else None


def check_tied(reader: WeightReader, where: str) -> None:
    """Raises: ConfigError where a tied model's head is not its embedding, bit for bit."""
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
            f"{where}: {_HEAD} differs from {_EMBEDDING}, and tie_word_embeddings=true says that they are one; set it "
            "to false if the head is one of its own, or delete it"
        )


def _refuse(names: Iterable[str], what: str) -> None:
    names = sorted(names)
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ConfigError(f"{what}: {', '.join(names[:_SHOWN])}{more}")
