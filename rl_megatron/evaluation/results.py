"""Parquet files with the results of an evaluation for every problem, and those of the run's start for comparison."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron import disk, log
from rl_megatron.evaluation.statistics import ProblemSamples, compute_problem_values

_DIGEST, _VALUES = b"problems", "values"


@dataclass(frozen=True)
class ProblemResult:
    """The completions of one problem with their scores.

    Attributes:
        prompt: The prompt as the model saw it.
        answer: The reference answer.
        location: The location of the problem, as file:line.
    """

    prompt: str
    answer: str
    location: str
    completions: Sequence[str]
    samples: ProblemSamples


def results_file(output_dir: Path, stage: str, name: str, step: int) -> Path:
    """Return the path of the file with a set's results at a step of a run."""
    return output_dir / "evaluations" / stage / name / f"step-{step:06}.parquet"


def write_results(path: Path, results: Sequence[ProblemResult], right_from: float, digest: str) -> None:
    """Write a table with one problem in each row. An existing file is replaced atomically.

    `right_from` is the lowest reward of a right sample. The file keeps the digest of the set's problems and sampling.
    """
    import pyarrow
    import pyarrow.parquet

    lines = [_describe_problem(number, result, right_from) for number, result in enumerate(results)]
    table = pyarrow.Table.from_pylist(lines, schema=_build_schema())
    table = table.replace_schema_metadata({_DIGEST: digest.encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content)
    disk.replace_file(path, content.getvalue())


def read_start_values(path: Path, digest: str) -> list[Mapping[str, float]] | None:
    """Return the statistics of every problem from the file, or None if it cannot be read or has another digest."""
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        return None
    try:
        table = pyarrow.parquet.read_table(path, columns=[_VALUES])
    except (OSError, pyarrow.ArrowException) as error:
        log.once(f"{path} cannot be read ({error}), so the evaluation is not compared with it")
        return None
    if (table.schema.metadata or {}).get(_DIGEST) != digest.encode():
        log.once(f"{path} has results of other problems or other sampling, so the evaluation is not compared with it")
        return None
    return [json.loads(text) for text in table.column(_VALUES).to_pylist()]


def _describe_problem(number: int, result: ProblemResult, right_from: float) -> dict[str, object]:
    samples = result.samples
    return {
        "problem": number,
        "prompt": result.prompt,
        "answer": result.answer,
        "location": result.location,
        "completions": list(result.completions),
        "rewards": list(samples.rewards),
        "lengths": list(samples.lengths),
        "truncated": list(samples.truncated),
        "answers": None if samples.answers is None else list(samples.answers),
        _VALUES: json.dumps(compute_problem_values(samples, right_from)),
    }


def _build_schema() -> Any:
    import pyarrow

    text = pyarrow.string()
    return pyarrow.schema(
        [
            ("problem", pyarrow.int64()),
            *((name, text) for name in ("prompt", "answer", "location")),
            ("completions", pyarrow.list_(text)),
            ("rewards", pyarrow.list_(pyarrow.float64())),
            ("lengths", pyarrow.list_(pyarrow.int64())),
            ("truncated", pyarrow.list_(pyarrow.bool_())),
            ("answers", pyarrow.list_(text)),
            (_VALUES, text),
        ]
    )
