"""Read a checkpoint's `.metadata`, which torch pickles, without running code that somebody put into it.

torch and megatron-core read the same file with plain pickle. So `check_metadata` is called before every load; it
refuses a file that names anything except the classes with which torch describes tensors.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.checkpoint.directory import Damaged

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
_TORCH_NAMES = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes that torch's writers put into `.metadata`."""

    def find_class(self, module: str, name: str) -> object:
        """Return the named class if it is one with which torch describes tensors, and refuse any other."""
        if name in _TORCH_NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch":
            import torch

            if name == "Size" or isinstance(getattr(torch, name, None), torch.dtype):
                return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")


def read_metadata(checkpoint: Path) -> Metadata:
    """Return torch's `Metadata` of a checkpoint.

    Raises:
        Damaged: The file cannot be read, names other classes, or has pickled objects in place of tensors.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    try:
        with (checkpoint / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise Damaged.from_cause(checkpoint, f".metadata cannot be read ({error})") from error
    if not isinstance(metadata, Metadata):
        raise Damaged.from_cause(checkpoint, f".metadata has a {type(metadata).__name__} instead of torch's Metadata")
    for name, entry in metadata.state_dict_metadata.items():
        # torch would unpickle such an object without limits.
        if isinstance(entry, BytesStorageMetadata):
            raise Damaged.from_cause(checkpoint, f".metadata says that {name} is a pickled object instead of a tensor")
    return metadata


def check_metadata(checkpoint: Path) -> None:
    """Check that torch and megatron-core can unpickle `.metadata` without running other code.

    Raises:
        Damaged: `read_metadata` refuses the file.
    """
    read_metadata(checkpoint)
