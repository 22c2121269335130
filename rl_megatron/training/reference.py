"""The reference of a policy: a second model, the policy's model with other adapters, or recorded logprobs.

`ReferenceModel` is on the device or in host memory. `AdapterReference` needs no second model. `RecordedReference` has
the logprobs of offline data, computed once, and needs no model at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron import disk, log
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.model.lora.attach import find_dora_adapters, find_trained_adapters
from rl_megatron.model.lora.originals import find_whole_parameters
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.inference import Inference, build_runner
from rl_megatron.training.runner import FusedHead

Placement = Literal["resident", "offload"]
"""Where reference weights are kept: always on the device, or in host memory and on the device only during a call."""

_DIGEST_BYTES = 16
_TENSORS = ("digests", "lengths", "logprobs")  # in the file: [N, bytes] uint8, [N] int64, all logprobs concatenated
_File = tuple[Tensor, Tensor, Tensor]
_EMPTY: _File = (torch.zeros(0, _DIGEST_BYTES, dtype=torch.uint8), torch.zeros(0, dtype=torch.long), torch.zeros(0))
_Logprobs = Callable[[BatchedDataDict], Tensor]


class ReferenceModel:
    """A frozen copy of a model. It owns the copied weights and their placement.

    Attributes:
        host_weights: The weights in host memory, or None if they are always on the device.
    """

    def __init__(self, model: ShardedModel, placement: Placement, fused_head: FusedHead | None):
        """Copy the current weights of `model`. Collective."""
        self.model = model.frozen_copy()
        self._inference = Inference(self.model, build_runner(self.model, fused_head))
        self.host_weights: HostWeights | None = None
        device = model.topology.device
        if placement == "offload" and device.type == "cuda":
            self.host_weights = HostWeights(self.model.model_chunks, device)
        elif placement == "offload":
            log.once("train.reference=offload has no effect on a CPU, where host memory is the device's memory")

    def logprobs(self, batch: Batch, batching: Batching) -> Tensor:
        """Return logprobs [B, S] fp32 under the frozen weights. Entry t corresponds to token t. Collective."""
        with self.host_weights.on_device() if self.host_weights is not None else nullcontext():
            return self._inference.logprobs(batch, batching)


class AdapterReference:
    """The policy's model with the adapters that it had when the reference was built. The weights are shared.

    If the adapters were untrained, a call switches them off. Otherwise the reference keeps copies of them, which
    replace the current adapters during a call. Frozen adapters stay active in either case.
    """

    def __init__(self, model: ShardedModel, inference: Inference):
        """Keep the current adapters of `model`. `inference` computes the model's logprobs. Collective."""
        model.gather_parameters()
        self._model, self._inference, self._start = model, inference, None
        if not model.adapters_are_new:
            self._start = [weight.detach().clone() for weight in self._weights()]

    def logprobs(self, batch: Batch, batching: Batching) -> Tensor:
        """Return logprobs [B, S] fp32 with the original adapters. Entry t corresponds to token t. Collective."""
        self._model.gather_parameters()
        self._model.set_training(False)
        with self._model.adapters_off(trained_only=True) if self._start is None else self._use_weights(self._start):
            return self._inference.logprobs(batch, batching)

    def _weights(self) -> list[torch.nn.Parameter]:
        model_chunks = self._model.model_chunks
        whole = [weight for weight, _ in find_whole_parameters(model_chunks)]
        return [weight for adapter in find_trained_adapters(model_chunks) for weight in adapter.parameters()] + whole

    @contextmanager
    def _use_weights(self, start: list[Tensor]) -> Iterator[None]:
        current = [weight.detach().clone() for weight in self._weights()]
        try:
            self._set(start)
            yield
        finally:
            self._set(current)

    def _set(self, values: list[Tensor]) -> None:
        _copy(values, self._weights())
        for adapter in find_dora_adapters(self._model.model_chunks):
            adapter.forget_lengths()


@torch.no_grad()
def _copy(values: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


class HostWeights:
    """The owner of copies of modules' parameters in host memory (pinned if there is a GPU).

    The copies are sent to the device for each call. Between calls the modules' parameters are empty.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device):
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._host = [parameter.data.to("cpu", copy=True) for parameter in self._parameters]
        if device.type == "cuda":
            self._host = [weights.pin_memory() for weights in self._host]
        self._device = device
        self._free_device()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the parameters on the device during the block."""
        try:
            for parameter, weights in zip(self._parameters, self._host, strict=True):
                parameter.data = weights.to(self._device, non_blocking=True)
            yield
        finally:
            self._free_device()

    def _free_device(self) -> None:
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)


class RecordedReference:
    """The logprobs of recorded sequences, each at its `temperature` (default 1). It owns the logprobs and their file.

    Sequences are recognized by their tokens and temperature. Therefore a sequence may be in any batch, and a resumed
    run may have more sequences than the earlier run.
    """

    def __init__(self, path: Path, reference: str, ranks: Ranks):
        """Read the logprobs in the file `path` on rank 0, and send them to all ranks. Collective.

        If the file does not exist, belongs to other weights or cannot be read, no sequence is recorded yet, and the
        next `complete` writes a new file. `reference` is the digest of the reference's weights (`digest_weights`).
        """
        self._path, self._reference, self._ranks = path, reference, ranks
        tensors = ranks.share(self._read)  # split afterwards, because a view is pickled with its whole storage
        self._sequences: dict[bytes, Tensor] = _split(*tensors)

    def complete(self, batches: Iterable[BatchedDataDict], logprobs: _Logprobs) -> None:
        """Record the sequences of `batches` that are not recorded yet. Collective.

        The file is written once, at the end, so it is either complete or unchanged. If it cannot be written, a
        warning is logged, and the logprobs are kept in memory only. `logprobs` returns the logprobs [B, S] of a batch.
        """
        num_recorded = len(self._sequences)
        for batch in batches:
            digests = _compute_digests(batch)
            fresh = [index for index, digest in enumerate(digests) if digest not in self._sequences]
            if fresh:
                values = logprobs(batch if len(fresh) == batch.size else batch.select_indices(fresh)).cpu()
                for index, sequence in zip(fresh, values, strict=True):
                    self._sequences[digests[index]] = sequence[: int(batch["input_lengths"][index])].clone()
        if len(self._sequences) > num_recorded:
            failure = self._ranks.try_on_rank0(self._write, lambda error: disk.describe(error, self._path))
            if failure is not None:
                log.once(f"{self._path} cannot be written ({failure}); a resumed run computes these logprobs again")

    def logprobs(self, batch: Batch, batching: Batching | None = None) -> Tensor:
        """Return logprobs [B, S] fp32. Entry t corresponds to token t, and entries past `input_lengths` are 0.

        `batching` has no effect, because no forward pass is needed. The signature is that of
        `ReferenceModel.logprobs`.
        """
        whole = torch.zeros(batch["input_ids"].shape, dtype=torch.float32)
        for index, digest in enumerate(_compute_digests(batch)):
            if digest not in self._sequences:
                raise RuntimeError(
                    f"sequence {index} of the batch is not among the {len(self._sequences)} recorded sequences"
                )
            values = self._sequences[digest]
            whole[index, : len(values)] = values
        return whole

    def _read(self) -> _File:
        if not self._path.exists():
            return _EMPTY
        try:
            with safe_open(self._path, "pt") as file:
                if (file.metadata() or {}).get("reference") != self._reference:
                    log.once(f"{self._path} belongs to another reference policy; the logprobs are computed again")
                    return _EMPTY
                digests, lengths, logprobs = (file.get_tensor(name) for name in _TENSORS)
                return digests, lengths, logprobs
        except (OSError, SafetensorError) as error:
            log.once(f"{self._path} cannot be read ({error}); the logprobs are computed again")
            return _EMPTY

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.incomplete")
        digests = torch.tensor([list(digest) for digest in self._sequences], dtype=torch.uint8)
        lengths = torch.tensor([len(values) for values in self._sequences.values()])
        tensors = (digests, lengths, torch.cat(list(self._sequences.values())))
        try:
            save_file(dict(zip(_TENSORS, tensors, strict=True)), partial, metadata={"reference": self._reference})
            partial.replace(self._path)
        finally:
            partial.unlink(missing_ok=True)


def _split(digests: Tensor, lengths: Tensor, logprobs: Tensor) -> dict[bytes, Tensor]:
    """Return the logprobs of each sequence by its digest."""
    sequences = logprobs.split(lengths.tolist()) if len(lengths) else ()
    return {bytes(digest): values for digest, values in zip(digests.tolist(), sequences, strict=True)}


def _compute_digests(batch: Mapping[str, Tensor]) -> list[bytes]:
    """Return the digest of each sequence's tokens (up to `input_lengths`) and temperature."""
    ids, lengths = batch["input_ids"].cpu(), batch["input_lengths"].tolist()
    temperatures = batch["temperature"].tolist() if "temperature" in batch else [1.0] * len(lengths)
    return [
        hashlib.blake2b(
            ids[index, :length].to(torch.int64).numpy().tobytes() + f"{temperature}".encode(), digest_size=_DIGEST_BYTES
        ).digest()
        for index, (length, temperature) in enumerate(zip(lengths, temperatures, strict=True))
    ]
