"""Read and write files of rollouts: one Parquet file for each step, with one sequence in each row.

A trajectory is a sequence of tokens, some of which the policy has sampled. The others are the prompt and, with several
turns, the texts of an environment. A trajectory whose past was rewritten has several sequences. Every number that
training reads is stored exactly, so that a run can learn from the files exactly as from the rollouts themselves.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_megatron import disk
from rl_megatron.batching.batch import DATA_SET
from rl_megatron.batching.routing import ROUTED_EXPERTS, UNKNOWN_EXPERT
from rl_megatron.batching.trajectory_index import TRAJECTORY, TrajectoryIndex
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rollouts.batch import TURN, TURN_REWARDS, build_component_keys

# Numeric columns: (the column, the key of the batch, the type of both).
_NUMBERS = (
    ("reward", "rewards", torch.float32),
    ("weight", "sample_mask", torch.float32),
    ("stopped", "stopped", torch.bool),
    ("prompt_length", "prompt_lengths", torch.int64),
    ("temperature", "temperature", torch.float32),
    ("top_k", "top_k", torch.int64),
    ("top_p", "top_p", torch.float32),
    ("weight_version", "weight_version", torch.int64),
)
# Keys of a batch whose columns have other forms.
_OTHERS = ("input_ids", "input_lengths", "token_mask", "generation_logprobs", "token_weight_versions", ROUTED_EXPERTS)
KEPT = frozenset((*_OTHERS, DATA_SET, TRAJECTORY, TURN, TURN_REWARDS, *(key for _, key, _ in _NUMBERS)))


@dataclass(frozen=True)
class Draw:
    """The rollouts of one round of a step, with data for people who read the file.

    Attributes:
        round: The round of dynamic sampling, from 0.
        rollouts: The batch that a rollout engine returned, with `rewards`.
        prompts: The prompt of each trajectory.
        scores: For each reward function, and for the environment, the score of each trajectory; None for a missing
            score.
    """

    round: int
    rollouts: BatchedDataDict
    prompts: Sequence[EncodedPrompt]
    scores: Mapping[str, Sequence[float | None]]


def rollout_file(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06}.parquet"


def build_rows(
    step: int,
    draw: Draw,
    tokenizer: Tokenizer,
    *,
    samples_per_prompt: int,
    newest_version: int,
    advantages: Mapping[int, Tensor],
) -> Iterator[dict[str, Any]]:
    """Yield the row of each sequence of a draw.

    Args:
        step: The step.
        draw: The rollouts.
        tokenizer: The run's tokenizer.
        samples_per_prompt: How many consecutive trajectories belong to one prompt.
        newest_version: The version of the policy's weights.
        advantages: For each sequence that the step trained on, by its number in the draw, the advantages [S].
    """
    batch, owners = draw.rollouts, TrajectoryIndex(draw.rollouts).owner.tolist()
    for number in range(batch.size):
        length, start = int(batch["input_lengths"][number]), int(batch["prompt_lengths"][number])
        ids, sampled = batch["input_ids"][number, :length], batch["token_mask"][number, :length].bool()
        versions = batch["token_weight_versions"][number, :length]
        learned, owner = advantages.get(number), owners[number]
        row: dict[str, Any] = {
            "step": step,
            "round": draw.round,
            "number": number,
            "trajectory": owner,
            "group": owner // samples_per_prompt,
            "is_learned_from": learned is not None,
            "location": draw.prompts[owner].problem.location,
            "data_set": draw.prompts[owner].data_set,
            "prompt": tokenizer.decode(ids[:start].tolist()),
            "completion": tokenizer.decode(ids[start:].tolist()),
            "age": newest_version - int(batch["weight_version"][number]),
            "ids": ids.tolist(),
            "sampled": sampled.tolist(),
            "logprobs": batch["generation_logprobs"][number, :length][sampled].tolist(),
            "advantages": None if learned is None else learned[:length][sampled].tolist(),
            "versions": list(_find_spans(versions.tolist())),
            "rewards": [
                {"turn": 0, "component": name, "value": values[owner]}
                for name, values in draw.scores.items()
                if values[owner] is not None
            ],
            "turns": list(_find_turns(batch, number)) if TURN in batch else None,
        }
        row |= {column: batch[key][number].item() for column, key, _ in _NUMBERS}
        if ROUTED_EXPERTS in batch:
            experts = batch[ROUTED_EXPERTS][number, : length - 1]
            row |= {"experts": experts.flatten().tolist(), "experts_shape": list(experts.shape[1:])}
        yield row


def _find_spans(versions: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield the spans of sampled tokens with one version of the weights; other tokens have the version −1."""
    start = 0
    for version, tokens in groupby(versions):
        end = start + len(list(tokens))
        if version >= 0:
            yield {"version": version, "start": start, "end": end}
        start = end


def _find_turns(batch: BatchedDataDict, number: int) -> Iterator[dict[str, object]]:
    """Yield the turns of a sequence: their numbers in the trajectory, tokens and rewards."""
    start = 0
    for turn, tokens in groupby(batch[TURN][number].tolist()):
        end = start + len(list(tokens))
        if turn >= 0:
            yield {"turn": turn, "start": start, "end": end, "reward": batch[TURN_REWARDS][number, end - 1].item()}
        start = end


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
    """Return the rows of the file of a step, with all columns or only with `columns`."""
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        if missing := [name for name in _build_schema().names if name not in names]:
            raise ConfigError(f"{path} is not a file of rollouts: it has no column {missing[0]}")
        return pyarrow.parquet.read_table(path, columns=columns and list(columns)).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as a file of rollouts: {error}") from error


def rows_to_batch(rows: Sequence[Mapping[str, Any]], components: Sequence[str] | None = None) -> BatchedDataDict:
    """Convert the rows of one round to a batch that is bitwise equal to the rollouts that were written.

    Args:
        rows: The rows.
        components: Names of reward functions whose scores the batch gets, besides those in the rows. None: the batch
            gets no scores.
    """
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    columns = torch.arange(int(lengths.max()))
    within = columns < lengths[:, None]
    sampled = _fill(within, [row["sampled"] for row in rows], torch.bool, 0)
    versions = torch.full(within.shape, -1)
    for number, row in enumerate(rows):
        for span in row["versions"]:
            versions[number, span["start"] : span["end"]] = span["version"]
    batch = BatchedDataDict(
        {
            "input_ids": _fill(within, [row["ids"] for row in rows], torch.long, 0),
            "input_lengths": lengths,
            "token_mask": sampled.float(),
            "generation_logprobs": _fill(sampled, [row["logprobs"] for row in rows], torch.float32, 0.0),
            "token_weight_versions": versions,
        }
    )
    for column, key, dtype in _NUMBERS:
        batch[key] = torch.tensor([row[column] for row in rows], dtype=dtype)
    if rows[0]["turns"] is not None:
        batch |= _build_turn_keys(rows, within.shape)
    if any(row["experts"] is not None for row in rows):
        batch[ROUTED_EXPERTS] = _build_experts(rows, len(columns))
    if components is not None:
        row_scores = [{reward["component"]: reward["value"] for reward in row["rewards"]} for row in rows]
        names = dict.fromkeys(chain(components, *row_scores))
        scores = {name: [scores.get(name) for scores in row_scores] for name in names}
        batch |= build_component_keys(scores, batch["sample_mask"] != 0, TURN in batch)
    return batch


def _build_turn_keys(rows: Sequence[Mapping[str, Any]], shape: torch.Size) -> dict[str, Tensor]:
    numbers, rewards = torch.full(shape, -1), torch.zeros(shape)
    for number, row in enumerate(rows):
        for turn in row["turns"]:
            numbers[number, turn["start"] : turn["end"]] = turn["turn"]
            rewards[number, turn["end"] - 1] = turn["reward"]
    return {TRAJECTORY: torch.tensor([row["trajectory"] for row in rows]), TURN: numbers, TURN_REWARDS: rewards}


def _build_experts(rows: Sequence[Mapping[str, Any]], width: int) -> Tensor:
    shape = tuple(rows[0]["experts_shape"])
    experts = torch.full((len(rows), width, *shape), UNKNOWN_EXPERT, dtype=torch.int16)
    for number, row in enumerate(rows):
        values = torch.tensor(row["experts"], dtype=torch.int16).view(-1, *shape)
        experts[number, : len(values)] = values
    return experts


def _fill(mask: Tensor, values: Sequence[Sequence[object]], dtype: torch.dtype, rest: float) -> Tensor:
    """Return a tensor that has the values, in order, where the mask is true, and `rest` elsewhere."""
    result = torch.full(mask.shape, rest, dtype=dtype)
    result[mask] = torch.tensor([value for row in values for value in row], dtype=dtype)
    return result


def _build_schema() -> Any:
    import pyarrow as arrow

    span = arrow.struct([("version", arrow.int64()), ("start", arrow.int32()), ("end", arrow.int32())])
    turn = arrow.struct(
        [("turn", arrow.int32()), ("start", arrow.int32()), ("end", arrow.int32()), ("reward", arrow.float32())]
    )
    reward = arrow.struct([("turn", arrow.int32()), ("component", arrow.string()), ("value", arrow.float64())])
    types = {torch.float32: arrow.float32(), torch.bool: arrow.bool_(), torch.int64: arrow.int64()}
    return arrow.schema(
        [
            *((name, arrow.int32()) for name in ("step", "round", "number", "trajectory", "group")),
            ("is_learned_from", arrow.bool_()),
            *((name, arrow.string()) for name in ("location", "data_set", "prompt", "completion")),
            *((column, types[dtype]) for column, _, dtype in _NUMBERS),
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
