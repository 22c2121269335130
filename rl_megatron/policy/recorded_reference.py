"""Reference logprobs of offline data, computed once and kept: a policy that has them needs no reference model.

Rows are known by their tokens, so it does not matter which batch a row comes in, nor whether a resumed run reads the
same rows or more of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.collective_errors import on_main_rank

_DIGEST_BYTES = 16
_TENSORS = ("digests", "lengths", "logprobs")  # of the file: [rows, bytes] uint8, [rows] int64, all rows in one
_File = tuple[Tensor, Tensor, Tensor]
_EMPTY: _File = (torch.zeros(0, _DIGEST_BYTES, dtype=torch.uint8), torch.zeros(0, dtype=torch.long), torch.zeros(0))
_Logprobs = Callable[[BatchedDataDict], Tensor]


class RecordedReference:
    """logprobs [S] fp32 of every row that was recorded, at the row's `temperature` (default 1)."""

    def __init__(self, path: Path, reference: str):
        """What `path` holds of the policy `reference` (a digest of its weights). Collective: rank 0 reads. A file of
        another policy, or one that cannot be read, is left aside and replaced by the next `complete`."""
        self._path, self._reference = path, reference
        read = [self._read() if dist.get_rank() == 0 else None]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(read)  # three tensors: rows would be views, each sent with all of their storage
        self._rows: dict[bytes, Tensor] = _rows(*read[0])

    def complete(self, batches: Iterable[BatchedDataDict], logprobs: _Logprobs) -> None:
        """Records the rows of `batches` that are not known yet, by `logprobs` [B, S] of a batch; collective. What is
        new is written when all is there: the file is whole, or as it was."""
        known = len(self._rows)
        for batch in batches:
            digests = _digests(batch)
            fresh = [row for row, digest in enumerate(digests) if digest not in self._rows]
            if fresh:
                found = logprobs(batch if len(fresh) == batch.size else batch.select_indices(fresh)).cpu()
                for row, values in zip(fresh, found, strict=True):
                    self._rows[digests[row]] = values[: int(batch["input_lengths"][row])].clone()
        if len(self._rows) > known:
            failure = on_main_rank(self._write)
            if failure is not None:
                raise ConfigError(f"{self._path} cannot be written: {failure}; make room in output_dir")

    def logprobs(self, data: BatchedDataDict) -> Tensor:
        """[B, S] fp32, entry t of token t, 0 past a row's `input_lengths`.

        Raises: RuntimeError naming a row that was never recorded.
        """
        whole = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
        for row, digest in enumerate(_digests(data)):
            if digest not in self._rows:
                raise RuntimeError(
                    f"row {row} of the batch is none of the {len(self._rows)} whose reference is recorded"
                )
            values = self._rows[digest]
            whole[row, : len(values)] = values
        return whole.to(data["input_ids"].device)

    def _read(self) -> _File:
        if not self._path.exists():
            return _EMPTY
        try:
            with safe_open(self._path, "pt") as file:
                found = (file.metadata() or {}).get("reference")
                if found != self._reference:
                    log.once(f"{self._path} is of another reference policy: its logprobs are computed anew")
                    return _EMPTY
                return tuple(file.get_tensor(name) for name in _TENSORS)
        except (OSError, SafetensorError) as error:
            log.once(f"{self._path} cannot be read ({error}): its logprobs are computed anew")
            return _EMPTY

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".incomplete")
        digests = torch.tensor([list(digest) for digest in self._rows], dtype=torch.uint8)
        lengths = torch.tensor([len(row) for row in self._rows.values()])
        tensors = (digests, lengths, torch.cat(list(self._rows.values())))
        save_file(dict(zip(_TENSORS, tensors, strict=True)), partial, metadata={"reference": self._reference})
        os.replace(partial, self._path)


def _rows(digests: Tensor, lengths: Tensor, logprobs: Tensor) -> dict[bytes, Tensor]:
    rows = logprobs.split(lengths.tolist()) if len(lengths) else ()
    return {bytes(digest): row for digest, row in zip(digests.tolist(), rows, strict=True)}


def _digests(batch: BatchedDataDict) -> list[bytes]:
    """One for each row: of its tokens up to `input_lengths`, and of its temperature."""
    ids, lengths = batch["input_ids"].cpu(), batch["input_lengths"].tolist()
    temperatures = batch["temperature"].tolist() if "temperature" in batch else [1.0] * len(lengths)
    return [
        hashlib.blake2b(
            ids[row, :length].to(torch.int64).numpy().tobytes() + f"{temperature}".encode(), digest_size=_DIGEST_BYTES
        ).digest()
        for row, (length, temperature) in enumerate(zip(lengths, temperatures, strict=True))
    ]
