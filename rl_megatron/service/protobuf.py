"""The messages in which the API sends tensors and tokens, as tables from which protobuf builds its classes.

A table has the number and the type of each field. Fields whose type ends with "[]" are repeated, and "map NAME" is a
mapping of texts to NAME. Only the fields that this server reads or writes are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "training_service"
_FILE = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "bytes": _FILE.TYPE_BYTES, "string": _FILE.TYPE_STRING, "int32": _FILE.TYPE_INT32, "int64": _FILE.TYPE_INT64,
    "uint32": _FILE.TYPE_UINT32, "bool": _FILE.TYPE_BOOL, "double": _FILE.TYPE_DOUBLE,
}  # fmt: skip
FLOAT32, INT64, INT32 = 1, 2, 3
"""The numbers of a tensor's dtypes."""
STOP, LENGTH = 0, 1
"""The numbers of the reasons for which a completion ends."""

_TABLES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "OtherChunk": {},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "OtherChunk"), "dmel": (3, "OtherChunk")},
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "int64[]")},
    "Datum": {"model_input": (1, "Chunk[]"), "loss_fn_inputs": (2, "map Tensor")},
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"), "seq_id": (2, "int32"), "data": (3, "Datum[]"), "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"), "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "trailing_shape": (4, "int64[]"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "map BatchedTensor"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"), "loss_fn_outputs": (2, "ArrayRecord[]"), "metrics": (3, "map double"),
    },
    "TopkLogprobs": {
        "token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "uint32"), "length": (4, "uint32"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "SampledSequence[]"), "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"), "prompt_cache_hit_tokens": (4, "int32"),
        "target_prompt_logprobs": (5, "Tensor"),
    },
}  # fmt: skip


def _build_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, table in _TABLES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in table.items():
            if kind.startswith("map "):
                _add_map(message, field, number, kind.removeprefix("map "))
            else:
                _add_field(message, field, number, kind.removesuffix("[]"), is_repeated=kind.endswith("[]"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _TABLES}


def _add_field(message: Any, name: str, number: int, kind: str, is_repeated: bool = False) -> None:
    label = _FILE.LABEL_REPEATED if is_repeated else _FILE.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _FILE.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _add_map(message: Any, name: str, number: int, kind: str) -> None:
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    _add_field(entry, "key", 1, "string")
    _add_field(entry, "value", 2, kind)
    _add_field(message, name, number, f"{message.name}.{entry.name}", is_repeated=True)


_CLASSES = _build_classes()


def new_message(name: str) -> Any:
    """Return an empty message."""
    return _CLASSES[name]()
