"""Convert rollouts to the rows of a table (rows.py), and back to a batch.

A trajectory is a sequence of tokens, some of which the policy has sampled. The others are the prompt and, with several
turns, the texts of an environment. A trajectory whose past was rewritten has several sequences. Every number that
training reads is stored exactly, so that a run can learn from the rows exactly as from the rollouts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor

from rl_megatron.batching.batch import DATA_SET
from rl_megatron.batching.routing import ROUTED_EXPERTS, UNKNOWN_EXPERT
from rl_megatron.batching.trajectory_index import TRAJECTORY, TrajectoryIndex
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rollouts.batch import TURN, TURN_REWARDS, build_component_keys
from rl_megatron.rollouts.rows import NUMBERS, TURN_TEXTS

# Numeric columns -> keys of a batch.
_KEYS = {column: column for column in NUMBERS} | {
    "reward": "rewards",
    "weight": "sample_mask",
    "prompt_length": "prompt_lengths",
}
# Keys of a batch whose columns have other forms.
_OTHERS = ("input_ids", "input_lengths", "token_mask", "generation_logprobs", "token_weight_versions", ROUTED_EXPERTS)
KEPT = frozenset((*_OTHERS, DATA_SET, TRAJECTORY, TURN, TURN_REWARDS, *_KEYS.values()))


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
            TURN_TEXTS: list(_decode_turns(batch, number, tokenizer)) if TURN in batch else None,
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
        row |= {column: batch[key][number].item() for column, key in _KEYS.items()}
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


def _decode_turns(batch: BatchedDataDict, number: int, tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """Yield the texts of a sequence after its prompt: of each turn, and of what an environment or tools answered."""
    start, length = int(batch["prompt_lengths"][number]), int(batch["input_lengths"][number])
    for turn, tokens in groupby(batch[TURN][number, start:length].tolist()):
        end = start + len(list(tokens))
        text = tokenizer.decode(batch["input_ids"][number, start:end].tolist())
        yield {"turn": turn if turn >= 0 else None, "content": text}
        start = end


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
    for column, dtype in NUMBERS.items():
        batch[_KEYS[column]] = torch.tensor([row[column] for row in rows], dtype=getattr(torch, dtype))
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
