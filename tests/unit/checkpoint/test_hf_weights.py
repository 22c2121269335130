"""Safetensors files are compatible with the safetensors library, and damage is found before a tensor is read."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.checkpoint.hf_weights import check_tensors, check_tied, find_tensors, find_tied_head
from rl_megatron.checkpoint.safetensors_files import INDEX, SINGLE, WeightReader, WeightWriter, read_header
from rl_megatron.config.errors import ConfigError
from rl_megatron.model.families.table import Slab, TableBuilder, WeightTable

SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 3), "d": (7, 1)}


def values(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def two_files(directory: Path) -> Path:
    """Write a and b into one file, c and d into another, and their index."""
    tensors = values()
    files = {"one.safetensors": ("a", "b"), "two.safetensors": ("c", "d")}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def reindexed(directory: Path, **changes: str | None) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in (index["weight_map"] | changes).items() if v is not None}
    (directory / INDEX).write_text(json.dumps(index))


def test_rows_of_files_written_by_the_library_are_read(tmp_path):
    tensors = values()
    with WeightReader(find_tensors(two_files(tmp_path))) as reader:
        assert {name: place.shape for name, place in reader.locations.items()} == SHAPES
        for name, first, last in (("a", 1, 3), ("b", 2, 5), ("d", 0, 7), ("c", 1, 1)):
            into = torch.empty_like(tensors[name][first:last])
            reader.read_rows(name, first, into)
            assert torch.equal(into, tensors[name][first:last])


@pytest.mark.parametrize("max_shard_bytes", [10**6, 40, 1])
def test_the_library_reads_tensors_that_were_written_in_any_order(tmp_path, max_shard_bytes):
    """Rows are written from the last to the first, and a matrix column by column. One file has fp32 and bf16."""
    tensors = values() | {"b": values(torch.float32)["b"]}
    writer = WeightWriter(tmp_path, SHAPES, lambda name: tensors[name].dtype, max_shard_bytes)
    for name, tensor in reversed(tensors.items()):
        if name == "a":
            for column in range(3):
                writer.write(name, 0, column, tensor[:, column : column + 1])
        else:
            for row in reversed(range(len(tensor))):
                writer.write(name, row, 0, tensor[row : row + 1])
    writer.finish()
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == SHAPES.keys()
    for name, tensor in tensors.items():
        assert found[name][1].dtype == tensor.dtype and torch.equal(found[name][1], tensor)
    if len(files) == 1:
        assert files[0].name == SINGLE and not (tmp_path / INDEX).exists()
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
        assert all(
            size <= max_shard_bytes or len(load_file(file)) == 1 for size, file in zip(sizes, files, strict=True)
        )
    assert all((place.start - 8) % place.dtype.itemsize == 0 for file in files for place in read_header(file).values())


def test_a_tensor_that_was_not_written_is_named(tmp_path):
    writer = WeightWriter(tmp_path, SHAPES, lambda name: torch.float32, 100)
    writer.write("a", 0, 0, torch.ones(4, 3))
    with pytest.raises(RuntimeError, match="3 tensors were not written exactly once, such as b"):
        writer.finish()


def test_parts_of_stacked_experts_are_written_where_they_belong(tmp_path):
    """Columns of gate and up alternate, parts are stored transposed, and blocks have some of their rows and columns."""
    stacked = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    writer = WeightWriter(tmp_path, {"experts": (2, 6, 8)}, lambda name: torch.float32, 1 << 20)
    for expert, first in itertools.product(range(2), range(2)):
        slab = Slab(expert, first, step=2, count=4)
        part = stacked[expert, :, first::2].T
        for rows, columns in ((slice(0, 4), slice(0, 2)), (slice(0, 1), slice(2, 6)), (slice(1, 4), slice(2, 6))):
            writer.write_slab("experts", slab, rows.start, columns.start, part[rows, columns])
    writer.finish()
    assert torch.equal(load_file(tmp_path / SINGLE)["experts"], stacked)


def cut(directory: Path) -> None:
    file = directory / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def lengthened(directory: Path) -> None:
    file = directory / "two.safetensors"
    file.write_bytes(file.read_bytes() + b"123")


def with_header(directory: Path, header: bytes) -> None:
    (directory / "two.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def of_dtype(directory: Path, dtype: torch.dtype) -> None:
    save_file({"c": values()["c"].to(dtype), "d": values()["d"]}, directory / "two.safetensors")


def overlapping(directory: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    with_header(directory, json.dumps({"c": entry, "d": entry}).encode())


DAMAGES = {
    "cut": (cut, r"two\.safetensors is truncated: it has \d+ bytes, and its header describes \d+"),
    "too long": (lengthened, r"two\.safetensors is too long"),
    "cut within its header": (
        lambda d: (d / "two.safetensors").write_bytes(b"\x40" + bytes(20)),
        "is truncated, or is not",
    ),
    "empty": (lambda d: (d / "two.safetensors").write_bytes(b""), "is truncated, or is not a safetensors file"),
    "no JSON": (lambda d: with_header(d, b"{not json"), "its header cannot be read"),
    "no offsets": (lambda d: with_header(d, b'{"c": {"dtype": "F32"}}'), "its header cannot be read"),
    "overlapping": (overlapping, "begins at byte"),
    "quantised": (
        lambda d: of_dtype(d, torch.float8_e4m3fn),
        r"two\.safetensors: c is F8_E4M3, which is not supported; supported dtypes: F32",
    ),
    "missing": (
        lambda d: (d / "two.safetensors").unlink(),
        r"two\.safetensors is missing, although .*index\.json names",
    ),
    "ghost in the index": (lambda d: reindexed(d, ghost="two.safetensors"), "two.safetensors lacks .* ghost$"),
    "in another file": (lambda d: reindexed(d, a="two.safetensors"), "one.safetensors has tensors .* a$"),
    "not in the index": (lambda d: reindexed(d, a=None), "one.safetensors has tensors .* does not place there: a$"),
    "outside": (lambda d: reindexed(d, a="../one.safetensors"), "names a file in another directory"),
    "an index without a map": (lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
    "an index that is no JSON": (lambda d: (d / INDEX).write_text("{"), "cannot be read as JSON"),
    "two sets of weights": (lambda d: (d / SINGLE).write_bytes(b""), f"has both {INDEX} and {SINGLE}"),
    "no safetensors": (lambda d: (d / INDEX).unlink(), f"has neither {SINGLE} nor {INDEX}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path, damage):
    directory = two_files(tmp_path)
    do, message = DAMAGES[damage]
    do(directory)
    with pytest.raises(ConfigError, match=message):
        find_tensors(directory)


def table_of_all() -> WeightTable:
    table = TableBuilder()
    for name, shape in SHAPES.items():
        table.add(name, name.upper(), *shape, fp32=name == "b")
    return table.build()


def changed(tmp_path: Path, **changes: torch.Tensor | None) -> dict:
    tensors = {name: tensor for name, tensor in (values() | changes).items() if tensor is not None}
    save_file(tensors, tmp_path / SINGLE)
    return find_tensors(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": None}, "lacks tensors that its config.json asks for: a$"),
        ({"a": None, "b": None, "c": None, "d": None, "e": torch.ones(1)}, "has tensors that .* does not ask for: e$"),
        ({f"e{i}": torch.ones(1) for i in range(5)}, "does not ask for: e0, e1, e2 and 2 more"),
        ({"a": torch.ones(3, 4).bfloat16()}, r"a has shape \(3, 4\); its config.json asks for \(4, 3\)"),
        ({"c": torch.ones(2, 3)}, "c is F32 and a is BF16; all must have the same dtype"),
        ({"b": torch.ones(5).half()}, "b is F16; it must be F32 or BF16"),
        ({"lm_head.weight": torch.ones(1)}, "does not ask for: lm_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(tmp_path, changes, message):
    places = changed(tmp_path, **changes)
    with pytest.raises(ConfigError, match="there.*" + message):
        check_tensors(places, table_of_all(), "there")


def test_the_common_dtype_of_the_tensors_is_returned(tmp_path):
    assert check_tensors(changed(tmp_path), table_of_all(), "there") == torch.bfloat16
    assert check_tensors(changed(tmp_path, b=torch.ones(5)), table_of_all(), "there") == torch.bfloat16
    old = changed(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    assert check_tensors(old, table_of_all(), "there") == torch.bfloat16


@pytest.mark.parametrize("differs", [None, "a value", "the sign of a zero", "dtype", "shape"])
def test_a_tied_models_head_must_equal_its_embedding(tmp_path, differs):
    embedding = torch.randn(9, 4)
    embedding[8, 3] = 0.0
    head = embedding.clone()
    if differs == "a value":
        head[8, 0] += 1e-6
    elif differs == "the sign of a zero":
        head[8, 3] = -0.0
    elif differs == "dtype":
        head = head.bfloat16()
    elif differs == "shape":
        head = head[:8].clone()
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head}, tmp_path / SINGLE)
    table = TableBuilder()
    table.add("model.embed_tokens.weight", "embedding", 9, 4)
    places, table = find_tensors(tmp_path), table.build()
    check_tensors(places, table, "there")
    assert find_tied_head(places, table) == "lm_head.weight"
    with WeightReader(places) as reader:
        if differs is None:
            check_tied(reader, "there")
        else:
            with pytest.raises(ConfigError, match=re.escape("lm_head.weight differs from model.embed_tokens.weight")):
                check_tied(reader, "there")
