"""Read and write the messages of the API that hold tensors: batches with a loss, its results, and samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_megatron.service.datums import Datum
from rl_megatron.service.losses import TARGETS
from rl_megatron.service.protobuf import FLOAT32, INT32, INT64, LENGTH, STOP, new_message
from rl_megatron.service.requests import Numbered, read_body
from rl_megatron.service.sampling import SampledPrompt, Top
from rl_megatron.service.trainer import LossResult

_DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}


@dataclass(frozen=True)
class LossRequest:
    """A request for a loss of datums, with or without its gradient.

    Attributes:
        model_id: The training run.
        seq_id: The number of the request among those of the run.
        data: The datums.
        loss_fn: The name of the loss.
        options: The options of the loss.
        forward_only: Whether no gradient is wanted.
    """

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    options: Mapping[str, object]
    forward_only: bool


def read_head(body: bytes) -> Numbered:
    """Return the run and the number of a request in a protobuf message. ValueError is raised if it has none."""
    message = _parse(body)
    return read_body(Numbered, json.dumps({"model_id": message.model_id, "seq_id": message.seq_id}).encode())


def _parse(body: bytes) -> Any:
    message = new_message("ForwardBackwardRequest")
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError, whose module depends on its implementation
        raise ValueError(f"the body is not a ForwardBackwardRequest in protobuf: {error}") from error
    return message


def read_loss_request(body: bytes) -> LossRequest:
    """Return the request in a protobuf message.

    Raises:
        ValueError: The body is not such a message, or a tensor in it is not valid.
    """
    message = _parse(body)
    options: dict[str, object] = dict(message.loss_fn_config)
    options |= {name: value.text or value.number for name, value in message.loss_fn_config_v2.items()}
    data = [_read_datum(datum, number) for number, datum in enumerate(message.data)]
    return LossRequest(message.model_id, message.seq_id, data, message.loss_fn, options, message.forward_only)


def _read_datum(message: Any, number: int) -> Datum:
    where = f"data[{number}]"
    tokens = []
    for index, chunk in enumerate(message.model_input):
        if not chunk.HasField("encoded_text"):
            raise ValueError(f"{where}.model_input[{index}] is not text; this server trains on tokens only")
        tokens.append(_read_array(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}.model_input[{index}]"))
    ids = np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, dtype=np.int64)
    sparse = {key for key, tensor in message.loss_fn_inputs.items() if tensor.HasField("sparse_csr")}
    inputs = {
        key: read_tensor(tensor, f"{where}.loss_fn_inputs.{key}", 0) for key, tensor in message.loss_fn_inputs.items()
    }
    if TARGETS in inputs:
        inputs[TARGETS] = inputs[TARGETS].astype(np.int64)
        if TARGETS in sparse and "weights" not in inputs:
            raise ValueError(f"{where}.loss_fn_inputs.{TARGETS} is sparse, so weights must say which targets count")
    return Datum(ids, inputs)


def _read_array(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where} has {len(data)} bytes, which are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype=dtype).copy()  # torch wants arrays that it may write to


def read_tensor(message: Any, where: str, fill: int) -> np.ndarray:
    """Return a tensor of the API, with `fill` at the entries that a sparse tensor leaves out.

    Raises:
        ValueError: Its parts do not fit together. The message begins with `where`.
    """
    if message.dtype not in _DTYPES:
        raise ValueError(f"{where} has the dtype {message.dtype}; float32, int64 and int32 are supported")
    dtype, shape = _DTYPES[message.dtype], tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _read_sparse(message.sparse_csr, dtype, shape, where, fill)
    values = _read_array(message.dense, dtype, where)
    shape = shape or (len(values),)
    if min(shape) < 0 or int(np.prod(shape, dtype=object)) != len(values):
        raise ValueError(f"{where} has {len(values)} values, which do not fill the shape {list(shape)}")
    return values.reshape(shape)


_MOST_ENTRIES = 1 << 28  # of a sparse tensor: a small message must not take all memory


def _read_sparse(message: Any, dtype: np.dtype, shape: tuple[int, ...], where: str, fill: int) -> np.ndarray:
    values = _read_array(message.values, dtype, where)
    starts = _read_array(message.crow_indices, np.dtype("<i8"), where)
    columns = _read_array(message.col_indices, np.dtype("<i8"), where)
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > _MOST_ENTRIES or len(starts) != shape[0] + 1:
        raise ValueError(f"{where} is sparse with the shape {list(shape)} and {len(starts)} row pointers")
    counts = np.diff(starts)
    fits = len(values) == len(columns) and starts[0] == 0 and starts[-1] == len(values) and (counts >= 0).all()
    if not fits or (len(columns) and (columns.min() < 0 or columns.max() >= shape[1])):
        raise ValueError(f"{where} is sparse, and its values, row pointers and columns do not fit together")
    dense = np.full(shape, fill, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def write_loss_result(result: LossResult) -> bytes:
    """Return the message with the logprobs of every datum and the metrics."""
    message = new_message("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    for name, value in result.metrics.items():
        message.metrics[name] = value
    start = 0
    while start < len(result.logprobs):  # a record has only datums with equally many targets for each position
        trailing = result.logprobs[start].shape[1:]
        stop = start
        while stop < len(result.logprobs) and result.logprobs[stop].shape[1:] == trailing:
            stop += 1
        _add_record(message, result.logprobs[start:stop], trailing)
        start = stop
    return message.SerializeToString()


def _add_record(message: Any, logprobs: Sequence[np.ndarray], trailing: tuple[int, ...]) -> None:
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    field = record.fields["logprobs"]
    arrays = [np.ascontiguousarray(values, dtype="<f4") for values in logprobs]
    field.dtype = FLOAT32
    field.trailing_shape.extend(trailing)
    field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
    field.data = b"".join(array.tobytes() for array in arrays)


def write_samples(result: SampledPrompt) -> bytes:
    """Return the message with the samples of one prompt."""
    message = new_message("SampleResponse")
    for number, completion in enumerate(result.completions):
        sequence = message.sequences.add(stop_reason=STOP if completion.reason == "stop" else LENGTH)
        sequence.tokens = np.array(completion.ids, dtype="<i4").tobytes()
        sequence.logprobs = np.array(completion.logprobs, dtype="<f4").tobytes()
        if result.sample_tops is not None:
            _write_top(sequence.topk_sampled_logprobs, result.sample_tops[number])
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.top is not None:
        _write_top(message.topk_prompt_logprobs, result.top)
    if result.target_logprobs is not None:
        tensor = message.target_prompt_logprobs
        tensor.dtype = FLOAT32
        tensor.shape.extend(result.target_logprobs.shape)
        tensor.dense = result.target_logprobs.astype("<f4").tobytes()
    return message.SerializeToString()


def _write_top(message: Any, top: Top) -> None:
    message.length, message.k = top.ids.shape
    message.token_ids = top.ids.astype("<i4").tobytes()
    message.logprobs = top.logprobs.astype("<f4").tobytes()
