"""A checkpoint's pickled metadata cannot run code, and its tensors cannot be pickled objects."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from rl_megatron.checkpoint.directory import Damaged
from rl_megatron.checkpoint.metadata import METADATA, check_metadata, read_metadata


class RunsACommand:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def tensor(dtype):
    size = torch.Size([4])
    return TensorStorageMetadata(TensorProperties(dtype), size, [ChunkStorageMetadata(torch.Size([0]), size)])


def write(directory, value):
    (directory / METADATA).write_bytes(pickle.dumps(value))


def test_metadata_of_tensors_is_read(tmp_path):
    entries = {"a": tensor(torch.float32), "b": tensor(torch.bfloat16)}
    write(tmp_path, Metadata(entries))
    check_metadata(tmp_path)
    assert set(read_metadata(tmp_path).state_dict_metadata) == set(entries)


def test_code_in_the_metadata_is_refused_and_not_run(tmp_path):
    proof = tmp_path / "proof"
    for planted in (RunsACommand(f"touch {proof}"), Metadata({"a": RunsACommand(f"touch {proof}")})):
        write(tmp_path, planted)
        with pytest.raises(Damaged, match=r"\.metadata cannot be read \(it names posix\.system, which"):
            read_metadata(tmp_path)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["load", "hub", "compile"])
def test_other_names_of_torch_are_refused(tmp_path, name):
    (tmp_path / METADATA).write_bytes(b"ctorch\n" + name.encode() + b"\n.")
    with pytest.raises(Damaged, match=f"it names torch.{name}"):
        read_metadata(tmp_path)


def test_a_pickled_object_in_place_of_a_tensor_is_refused(tmp_path):
    write(tmp_path, Metadata({"decoder.weight": BytesStorageMetadata()}))
    with pytest.raises(Damaged, match="decoder.weight is a pickled object instead of a tensor"):
        read_metadata(tmp_path)


def test_a_file_that_is_no_metadata_is_refused(tmp_path):
    write(tmp_path, {"a": 1})
    with pytest.raises(Damaged, match="has a dict instead of torch's Metadata"):
        read_metadata(tmp_path)
    (tmp_path / METADATA).write_bytes(b"garbage")
    with pytest.raises(Damaged, match="cannot be read"):
        read_metadata(tmp_path)
