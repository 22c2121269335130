"""Read and write the tables of rollouts: one Parquet file for each step, with one sequence in each row.

This module does not import torch, so that `rl-megatron rollouts` answers at once.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError

# Numeric columns, with their types, which torch and pyarrow call the same.
NUMBERS = {
    "reward": "float32",
    "weight": "float32",
    "stopped": "bool",
    "prompt_length": "int64",
    "temperature": "float32",
    "top_k": "int64",
    "top_p": "float32",
    "weight_version": "int64",
}
TURN_TEXTS = "turn_texts"  # a column that files of earlier versions lack


def rollout_file(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06}.parquet"


def check_replay(directory: Path, steps: range) -> None:
    """Check that a directory has the rollouts of these steps, which `rollout.replay` reads one after the other."""
    missing = [step for step in steps if not rollout_file(directory, step).is_file()]
    if missing:
        more = f" and of {len(missing) - 1} further steps" if len(missing) > 1 else ""
        raise ConfigError(
            f"rollout.replay={directory} has no rollouts of step {missing[0]}{more}; replay a run that had "
            "rollout.save_every=1, or lower train.steps"
        )


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the file of a step. A file that exists is replaced as a whole."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows), schema=_build_schema())
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content, compression="zstd")
    disk.replace_file(path, content.getvalue(), is_synced=True)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of the file of a step, with all columns or only with those of `columns` that it has."""
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        if missing := [name for name in _build_schema().names if name not in (*names, TURN_TEXTS)]:
            raise ConfigError(f"{path} is not a file of rollouts: it has no column {missing[0]}")
        chosen = columns and [name for name in columns if name in names]
        return pyarrow.parquet.read_table(path, columns=chosen).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as a file of rollouts: {error}") from error


def _build_schema() -> Any:
    import pyarrow as arrow

    span = arrow.struct([("version", arrow.int64()), ("start", arrow.int32()), ("end", arrow.int32())])
    turn = arrow.struct(
        [("turn", arrow.int32()), ("start", arrow.int32()), ("end", arrow.int32()), ("reward", arrow.float32())]
    )
    reward = arrow.struct([("turn", arrow.int32()), ("component", arrow.string()), ("value", arrow.float64())])
    return arrow.schema(
        [
            *((name, arrow.int32()) for name in ("step", "round", "number", "trajectory", "group")),
            ("is_learned_from", arrow.bool_()),
            *((name, arrow.string()) for name in ("location", "data_set", "prompt", "completion")),
            (TURN_TEXTS, arrow.list_(arrow.struct([("turn", arrow.int32()), ("content", arrow.string())]))),
            *((column, arrow.type_for_alias(dtype)) for column, dtype in NUMBERS.items()),
            ("age", arrow.int64()),
            ("ids", arrow.list_(arrow.int32())),
            ("sampled", arrow.list_(arrow.bool_())),
            ("logprobs", arrow.list_(arrow.float32())),
            ("advantages", arrow.list_(arrow.float32())),
            ("versions", arrow.list_(span)),
            ("rewards", arrow.list_(reward)),
            ("turns", arrow.list_(turn)),
            ("experts", arrow.list_(arrow.int16())),
            ("experts_shape", arrow.list_(arrow.int32())),
        ]
    )
