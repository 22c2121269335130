"""`RecordedReference`: reference logprobs of offline data, computed once and kept instead of a reference model.

Sequences are recognized by their tokens and temperature. Therefore a sequence may come in any batch, and a resumed run
may read more sequences than before.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron import disk, log
from rl_megatron.batching.config import Batching
from rl_megatron.batching.sharded import ShardedBatch
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.ranks import Ranks

_DIGEST_BYTES = 16
_TENSORS = ("digests", "lengths", "logprobs")  # in the file: [N, bytes] uint8, [N] int64, all logprobs concatenated
_File = tuple[Tensor, Tensor, Tensor]
_EMPTY: _File = (torch.zeros(0, _DIGEST_BYTES, dtype=torch.uint8), torch.zeros(0, dtype=torch.long), torch.zeros(0))
_Logprobs = Callable[[BatchedDataDict], Tensor]


class RecordedReference:
    """The logprobs of recorded sequences, each at its `temperature` (default 1). It owns them and their file."""

    def __init__(self, path: Path, reference: str, ranks: Ranks):
        """Read the logprobs in the file `path` on rank 0, and send them to all ranks. Collective.

        A file that belongs to other weights or cannot be read is ignored, and the next `complete` replaces it.

        Args:
            path: The file, which need not exist.
            reference: The digest of the reference's weights (`weights_digest`).
            ranks: The policy's ranks.
        """
        self._path, self._reference, self._ranks = path, reference, ranks
        read = ranks.share(self._read)  # as three tensors: a view would be sent with its whole storage
        self._sequences: dict[bytes, Tensor] = _split(*read)

    def complete(self, batches: Iterable[BatchedDataDict], logprobs: _Logprobs) -> None:
        """Record the sequences of `batches` that are not recorded yet. Collective.

        The file is written once, at the end, so it is either complete or unchanged. If it cannot be written, a warning
        says so, and the logprobs are kept in memory alone.

        Args:
            batches: Batches of sequences.
            logprobs: Returns the logprobs [B, S] of a batch.
        """
        known = len(self._sequences)
        for batch in batches:
            digests = _digests(batch)
            fresh = [index for index, digest in enumerate(digests) if digest not in self._sequences]
            if fresh:
                found = logprobs(batch if len(fresh) == batch.size else batch.select_indices(fresh)).cpu()
                for index, values in zip(fresh, found, strict=True):
                    self._sequences[digests[index]] = values[: int(batch["input_lengths"][index])].clone()
        if len(self._sequences) > known:
            failure = self._ranks.try_on_rank0(self._write, lambda error: disk.describe(error, self._path))
            if failure is not None:
                log.once(f"{self._path} cannot be written ({failure}); a resumed run computes these logprobs again")

    def logprobs(self, data: BatchedDataDict | ShardedBatch, batching: Batching | None = None) -> Tensor:
        """Return logprobs [B, S] fp32. Entry t corresponds to token t, and entries past `input_lengths` are 0.

        `batching` has no effect, because no forward pass is needed. It is there for the signature of
        `ReferenceModel.logprobs`.

        Raises:
            RuntimeError: A sequence was never recorded.
        """
        whole = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
        for index, digest in enumerate(_digests(data)):
            if digest not in self._sequences:
                raise RuntimeError(
                    f"sequence {index} of the batch is not among the {len(self._sequences)} recorded sequences"
                )
            values = self._sequences[digest]
            whole[index, : len(values)] = values
        return whole.to(data["input_ids"].device)

    def _read(self) -> _File:
        if not self._path.exists():
            return _EMPTY
        try:
            with safe_open(self._path, "pt") as file:
                found = (file.metadata() or {}).get("reference")
                if found != self._reference:
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


def _digests(batch: BatchedDataDict | ShardedBatch) -> list[bytes]:
    """Return one digest per sequence, of its tokens up to `input_lengths` and of its temperature."""
    ids, lengths = batch["input_ids"].cpu(), batch["input_lengths"].tolist()
    temperatures = batch["temperature"].tolist() if "temperature" in batch else [1.0] * len(lengths)
    return [
        hashlib.blake2b(
            ids[index, :length].to(torch.int64).numpy().tobytes() + f"{temperature}".encode(), digest_size=_DIGEST_BYTES
        ).digest()
        for index, (length, temperature) in enumerate(zip(lengths, temperatures, strict=True))
    ]
