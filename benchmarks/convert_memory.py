"""Measure how much memory a conversion takes, relative to its largest file of weights:

    python benchmarks/convert_memory.py

The command makes a Llama checkpoint of random bf16 weights in several files, and imports and exports it, each in a
separate process. It ends with status 1 if a peak exceeds 1.5 times the largest file. It keeps no files.

A peak is the largest resident set of the process during the conversion (VmHWM, which is reset at its start), less the
resident set before it, when every module is imported already. It includes the allocations of torch and Python, and the
pages of mapped files. It excludes the kernel's page cache, which belongs to no process.

"before" is the resident set before, of Python, torch and megatron-core. The rows of the table are:

    import                  Hugging Face directory → checkpoint
    export                  that checkpoint → Hugging Face directory
    export of whole parts   the same from a checkpoint whose every part is a whole tensor, as a run on one rank saves it
"""

from __future__ import annotations

import argparse
import filecmp
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from rl_megatron.checkpoint import hf_convert, hf_weights
from rl_megatron.checkpoint.safetensors_files import WeightWriter
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.llama import LLAMA

LIMIT = 1.5
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Measured:
    name: str
    largest_file: int
    before: int
    peak: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.peak / self.largest_file


def llama(num_bytes: int) -> ModelConfig:
    """Return a model of about so many bytes in bf16, a quarter of them in its embedding and head."""
    hidden = 2048 if num_bytes >= 5e8 else 256
    vocab_size = max(64, int(num_bytes / 4 / 2 / 2 / hidden))
    sizes = {"hidden_size": hidden, "ffn_hidden_size": 11 * hidden // 4, "vocab_size": vocab_size}
    heads = {"num_attention_heads": hidden // 64, "num_query_groups": hidden // 256}
    a_layer = hidden * hidden * (2 + 2 / 4 + 3 * 11 / 4)
    num_layers = max(1, round(num_bytes * 0.75 / 2 / a_layer))
    return ModelConfig(**sizes, **heads, num_layers=num_layers, tie_embeddings=False)


def make(directory: Path, num_bytes: int, num_files: int) -> None:
    model = llama(num_bytes)
    table = LLAMA.table(model, model.vocab_size)
    directory.mkdir(parents=True)
    writer = WeightWriter(directory, table.hf_shapes, lambda name: torch.bfloat16, num_bytes // num_files)
    for name, shape in table.hf_shapes.items():
        for first in range(0, shape[0], _ROWS_AT_ONCE):
            rows = min(_ROWS_AT_ONCE, shape[0] - first)
            writer.write(name, first, 0, torch.randn(rows, *shape[1:]).bfloat16())
    writer.finish()
    config = LLAMA.write_config(model, model.vocab_size) | {"dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


def measured_here(direction: str, source: Path, target: Path, max_shard_bytes: int) -> dict[str, float]:
    """Convert in this process, and report its peak memory and the time."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the current resident set
    before, began = _status("VmRSS"), time.perf_counter()
    if direction == "import":
        hf_convert.import_weights(source, target)
    elif direction == "import whole":
        hf_weights.BLOCK_BYTES = 1 << 60
        hf_convert.import_weights(source, target)
    else:
        hf_convert.export_weights(source, target, max_shard_bytes)
    return {"before": before, "peak": _status("VmHWM") - before, "seconds": time.perf_counter() - began}


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this benchmark needs Linux")


def _measure(name: str, direction: str, source: Path, target: Path, max_shard_bytes: int) -> Measured:
    command = [sys.executable, __file__, "--run", direction, str(source), str(target), str(max_shard_bytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    weights = source if direction.startswith("import") else target
    largest = max(file.stat().st_size for file in weights.glob("*.safetensors"))
    return Measured(name, largest, int(found["before"]), int(found["peak"]), found["seconds"])


def measure(scratch: Path, num_bytes: int, num_files: int, with_whole_parts: bool = True) -> list[Measured]:
    """Check that every exported file equals the imported one, byte for byte.

    Raises:
        RuntimeError: A file differs.
    """
    source, checkpoint, whole = scratch / "hf", scratch / "checkpoint", scratch / "whole"
    make(source, num_bytes, num_files)
    shard = num_bytes // num_files
    rows = [_measure("import", "import", source, checkpoint, shard)]
    rows.append(_measure("export", "export", checkpoint, scratch / "hf_again", shard))
    _compare(source, scratch / "hf_again")
    if with_whole_parts:
        _measure("", "import whole", source, whole, shard)
        rows.append(_measure("export of whole parts", "export", whole, scratch / "hf_whole", shard))
        _compare(source, scratch / "hf_whole")
    return rows


def _compare(source: Path, copy: Path) -> None:
    for file in source.glob("*.safetensors"):
        if not filecmp.cmp(file, copy / file.name, shallow=False):
            raise RuntimeError(f"{copy / file.name} is not what was imported")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint (default 1)")
    parser.add_argument("--files", type=int, default=5, help="of weights, about (default 5)")
    parser.add_argument("--scratch", help="a directory with room for four copies (default: the system's temporary one)")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.run:
        direction, source, target, shard = parsed.run
        print(json.dumps(measured_here(direction, Path(source), Path(target), int(shard))))
        return 0
    with tempfile.TemporaryDirectory(dir=parsed.scratch) as scratch:
        rows = measure(Path(scratch), int(parsed.gigabytes * 1e9), parsed.files)
    table = Table(title=f"{parsed.gigabytes:g} GB of weights; the limit is {LIMIT}")
    for column in ("conversion", "largest file", "before", "peak", "peak / file", "seconds"):
        table.add_column(column, justify="left" if column == "conversion" else "right")
    for row in rows:
        mib = (f"{size / 2**20:.0f} MiB" for size in (row.largest_file, row.before, row.peak))
        table.add_row(row.name, *mib, f"{row.ratio:.2f}", f"{row.seconds:.1f}")
    Console().print(table)
    return 0 if all(row.ratio <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
