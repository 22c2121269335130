"""The teachers of a stage, and what they add to a batch for the loss that the stage has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rl_megatron.algorithms.endpoint_teacher import EndpointTeacher
from rl_megatron.algorithms.stage import Stage
from rl_megatron.batching.config import Batching
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.config.teachers import TeacherConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.execution import FusedHead
from rl_megatron.execution.phase_timer import phase
from rl_megatron.losses.contract import LossFunction
from rl_megatron.policy.interfaces import Batch
from rl_megatron.policy.teacher import Teacher, check_vocabulary_of, load_teacher, teacher_model
from rl_megatron.topology.degrees import validate_model

# The keys that teachers add to a batch, for a loss over their top-k and for one over all logits.
TOPK_KEYS = frozenset({"teacher_topk_logits", "teacher_topk_indices"})
WHOLE_KEYS = frozenset({"teacher_logits"})
BatchT = TypeVar("BatchT", bound=Batch)


def uses_teacher(loss_fn: LossFunction) -> bool:
    """Return whether a loss reads a teacher's logits: its top-k or all of them."""
    return bool((TOPK_KEYS | WHOLE_KEYS) & set(getattr(loss_fn, "required_keys", ())))


def check_each_teacher(
    teachers: Sequence[TeacherConfig],
    stage: StageConfig,
    tokenizer: Tokenizer,
    lengths: Iterable[Sequence[int]],
    top_k: int,
) -> None:
    """Check that every teacher can be read, has the student's vocabulary, and fits the layout and the data.

    Args:
        teachers: The teachers.
        stage: The stage.
        tokenizer: The student's tokenizer.
        lengths: For each item of the data, the tokens of its sequences.
        top_k: How many logits of each token are read.

    Raises:
        ConfigError: One does not; the message names it.
    """
    longest = max((length for item in lengths for length in item), default=0)
    for teacher in teachers:
        if teacher.path is None:
            EndpointTeacher(teacher).check(tokenizer, min(top_k, tokenizer.vocab_size), longest)
            continue
        path = Path(teacher.path)
        if not path.is_dir():
            raise ConfigError(
                f"algorithm.teachers: there is no directory {teacher.path}; set path to a checkpoint or to a Hugging "
                "Face directory"
            )
        check_vocabulary_of(path, tokenizer)
        model, _ = teacher_model(path)
        if longest > model.max_sequence_length:
            raise ConfigError(
                f"algorithm.teachers: {teacher.path} reads at most {model.max_sequence_length} tokens, and the data "
                f"has sequences of up to {longest}; shorten them (data.too_long, generation.max_new_tokens), or choose "
                "another teacher"
            )
        try:
            validate_model(model, teacher.parallel or stage.parallel)
        except ConfigError as error:
            whose = "the student's layout" if teacher.parallel is None else "its own layout"
            raise ConfigError(f"algorithm.teachers: {teacher.path} runs in {whose}: {error}") from error


@dataclass(frozen=True)
class Teachers:
    """The teachers of a stage with the shares of their weights, which sum to 1.

    Attributes:
        models: The teachers.
        shares: Their shares.
        batching: How their batches are cut into microbatches.
        top_k: How many logits of each token are read.
        data_sets: The data sets that each teacher has; an empty tuple: all.
    """

    models: list[Teacher | EndpointTeacher]
    shares: list[float]
    batching: Batching
    top_k: int
    data_sets: list[tuple[str, ...]]

    @classmethod
    def of(cls, stage: Stage, teachers: Sequence[TeacherConfig], top_k: int) -> Teachers:
        """Load the teachers of a stage. Collective.

        Raises:
            ConfigError: Weights cannot be read.
        """
        config, topology = stage.config, stage.policy.topology
        fused_head = FusedHead() if config.train.fused_head else None
        minutes = config.train.collective_timeout_minutes
        models = [
            EndpointTeacher(each)
            if each.path is None
            else load_teacher(each, topology, stage.tokenizer.vocab_size, config.precision, fused_head, minutes)
            for each in teachers
        ]
        for model in models:
            if isinstance(model, EndpointTeacher):
                stage.close_at_end(model)
        total = sum(each.weight for each in teachers)
        shares = [each.weight / total for each in teachers]
        batching, k = Batching.of(config.train), min(top_k, stage.tokenizer.vocab_size)
        return cls(models, shares, batching, k, [each.data_sets for each in teachers])

    def reads_whole(self, loss_fn: LossFunction) -> Teacher | None:
        """Return the teacher whose whole vocabulary the loss reads while it trains, or None."""
        if not WHOLE_KEYS & set(getattr(loss_fn, "required_keys", ())):
            return None
        first = self.models[0]
        if isinstance(first, EndpointTeacher):  # the settings are checked for the package's own loss only
            raise ConfigError("algorithm.teachers: a loss over the whole vocabulary needs a teacher with a path")
        return first

    def with_topk(self, batch: BatchT, loss_fn: LossFunction, data_sets: Sequence[str] = ()) -> BatchT:
        """Return the batch with the teachers' top-k logits if the loss reads them. Collective.

        Args:
            batch: The batch.
            loss_fn: The loss.
            data_sets: The data set of each sequence, for teachers that have some data sets only.
        """
        if not TOPK_KEYS & set(getattr(loss_fn, "required_keys", ())):
            return batch
        with phase("teacher"):
            found = [
                self._topk_of(model, batch, [not own or name in own for name in data_sets])
                for model, own in zip(self.models, self.data_sets, strict=True)
            ]
        logits, ids = (torch.cat(parts, dim=-1) for parts in zip(*found, strict=True))
        batch["teacher_topk_logits"], batch["teacher_topk_indices"] = logits, ids
        if len(self.models) > 1:
            batch["teacher_weights"] = self._weights(len(logits), data_sets)[:, None]
        return batch

    def _weights(self, num_sequences: int, data_sets: Sequence[str]) -> Tensor:
        """Return the share of each teacher in each sequence, [B, teachers]; the shares of a sequence sum to 1."""
        weights = torch.tensor(self.shares).repeat(num_sequences, 1)
        for column, own in enumerate(self.data_sets):
            if own:
                weights[[name not in own for name in data_sets], column] = 0.0
        return weights / weights.sum(dim=1, keepdim=True)

    def _topk_of(self, model: Teacher | EndpointTeacher, batch: Batch, taught: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Return a teacher's top-k logits and ids of the sequences that it has, and 0 for the others. Collective."""
        if all(taught) or not isinstance(batch, BatchedDataDict):
            return model.topk_logits(batch, self.top_k, self.batching)
        shape = (*batch["input_ids"].shape, self.top_k)
        logits, ids = torch.zeros(shape), torch.zeros(shape, dtype=torch.long)
        if any(taught):
            mask = torch.tensor(taught)
            logits[mask], ids[mask] = model.topk_logits(batch.select_indices(mask), self.top_k, self.batching)
        return logits, ids

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the weighted mean of the teachers' logprobs of every token, [B, S]. Collective."""
        with phase("teacher"):
            found = [
                share * each.logprobs(batch, self.batching)
                for share, each in zip(self.shares, self.models, strict=True)
            ]
        return torch.stack(found).sum(dim=0)
