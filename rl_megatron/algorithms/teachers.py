"""The teachers of a stage, and the keys that they add to a batch for the stage's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rl_megatron.algorithms.endpoint_teacher import EndpointTeacher
from rl_megatron.batching.batch import DATA_SET, Batch
from rl_megatron.batching.config import Batching
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.config.teachers import TeacherConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.losses.contract import LossFunction
from rl_megatron.timing import phase
from rl_megatron.topology.degrees import validate_model
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.runner import FusedHead
from rl_megatron.training.teacher import Teacher, check_vocabulary, load_teacher, open_teacher

# The keys that teachers add to a batch, for a loss over their top-k logits and for one over all logits.
TOPK_KEYS = frozenset({"teacher_topk_logits", "teacher_topk_indices"})
WHOLE_KEYS = frozenset({"teacher_logits"})


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

    `lengths` has, for each item of the data, the lengths of its sequences. `top_k` logits of each token are read.
    """
    longest = max((length for item in lengths for length in item), default=0)
    for teacher in teachers:
        if teacher.path is None:
            EndpointTeacher(teacher, Ranks()).check(tokenizer, min(top_k, tokenizer.vocab_size), longest)
            continue
        path = Path(teacher.path)
        if not path.is_dir():
            raise ConfigError(
                f"algorithm.teachers: there is no directory {teacher.path}; set path to a checkpoint or to a Hugging "
                "Face directory"
            )
        check_vocabulary(path, tokenizer)
        model, _ = open_teacher(path)
        if longest > model.max_sequence_length:
            raise ConfigError(
                f"algorithm.teachers: {teacher.path} reads at most {model.max_sequence_length} tokens, but the data "
                f"has sequences of up to {longest}; shorten them (data.too_long, generation.max_new_tokens), or choose "
                "another teacher"
            )
        try:
            validate_model(model, teacher.parallel or stage.parallel)
        except ConfigError as error:
            whose = "the student's layout" if teacher.parallel is None else "its own layout"
            raise ConfigError(f"algorithm.teachers: {teacher.path} cannot run in {whose}: {error}") from error


@dataclass(frozen=True)
class Teachers:
    """The teachers of a stage, and their shares of the sum of all weights.

    Attributes:
        batching: How their batches are cut into microbatches.
        top_k: How many logits of each token are read.
        data_sets: The indices in `data.mix` of the data sets that each teacher teaches; an empty tuple means all.
    """

    models: list[Teacher | EndpointTeacher]
    shares: list[float]
    batching: Batching
    top_k: int
    data_sets: list[tuple[int, ...]]

    @classmethod
    def load(cls, loop: Loop, policy: MegatronPolicy, teachers: Sequence[TeacherConfig], top_k: int) -> Teachers:
        """Load the teachers of a stage. Collective."""
        config, topology = loop.config, policy.topology
        fused_head = FusedHead() if config.train.fused_head else None
        minutes = config.train.collective_timeout_minutes
        models = [
            EndpointTeacher(teacher, topology.ranks)
            if teacher.path is None
            else load_teacher(teacher, topology, loop.tokenizer.vocab_size, config.precision, fused_head, minutes)
            for teacher in teachers
        ]
        for model in models:
            if isinstance(model, EndpointTeacher):
                loop.close_at_end(model)
        total = sum(teacher.weight for teacher in teachers)
        shares = [teacher.weight / total for teacher in teachers]
        batching, k = Batching.from_config(config.train), min(top_k, loop.tokenizer.vocab_size)
        mixture = [data_set.shown_name for data_set in config.data.mix]
        data_sets = [tuple(mixture.index(name) for name in teacher.data_sets) for teacher in teachers]
        return cls(models, shares, batching, k, data_sets)

    def find_whole_teacher(self, loss_fn: LossFunction) -> Teacher | None:
        """Return the teacher if the loss reads its logits of the whole vocabulary, otherwise None."""
        if not WHOLE_KEYS & set(getattr(loss_fn, "required_keys", ())):
            return None
        first = self.models[0]
        if isinstance(first, EndpointTeacher):  # the settings refuse this for `full_distillation` only
            raise ConfigError("algorithm.teachers: a loss over the whole vocabulary needs a teacher with a path")
        return first

    def add_topk(self, batch: Batch, loss_fn: LossFunction) -> Batch:
        """Add the teachers' top-k logits to a batch if the loss reads them, and return it. Collective."""
        if not TOPK_KEYS & set(getattr(loss_fn, "required_keys", ())):
            return batch
        shape = (len(batch.numbers), batch.width, self.top_k)
        with phase("teacher"):
            top = [
                self._read(
                    batch, taught, lambda part, model=model: model.topk_logits(part, self.top_k, self.batching),
                    (torch.zeros(shape), torch.zeros(shape, dtype=torch.long)),
                )
                for model, taught in zip(self.models, self._taught(batch), strict=True)
            ]  # fmt: skip
        batch["teacher_topk_logits"], batch["teacher_topk_indices"] = (
            torch.cat(parts, dim=-1) for parts in zip(*top, strict=True)
        )
        if len(self.models) > 1:
            batch["teacher_weights"] = self._weights(batch)[:, None]
        return batch

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the weighted mean of the teachers' logprobs of every token, [n, S]. Collective."""
        mean, weights = torch.zeros(len(batch.numbers), batch.width), self._weights(batch)
        with phase("teacher"):
            for model, taught, share in zip(self.models, self._taught(batch), weights.unbind(1), strict=True):
                (logprobs,) = self._read(
                    batch, taught, lambda part, model=model: (model.logprobs(part, self.batching),),
                    (torch.zeros_like(mean),),
                )  # fmt: skip
                mean += share[:, None] * logprobs
        return mean

    def _taught(self, batch: Batch) -> list[Tensor]:
        """Return for each teacher which sequences of the global batch it teaches, [B] bool."""
        every = torch.ones(batch.size, dtype=torch.bool)
        return [torch.isin(batch.facts[DATA_SET], torch.tensor(sets)) if sets else every for sets in self.data_sets]

    def _weights(self, batch: Batch) -> Tensor:
        """Return the share of each teacher in each sequence, [n, teachers]; the shares of a sequence sum to 1."""
        weights = torch.stack(self._taught(batch), dim=1) * torch.tensor(self.shares)
        return batch.select_local(weights / weights.sum(dim=1, keepdim=True))

    @staticmethod
    def _read(
        batch: Batch,
        taught: Tensor,
        read: Callable[[Batch], Sequence[Tensor]],
        blank: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Return the result of `read` for the sequences that a teacher teaches, and `blank` for others. Collective."""
        if taught.all():
            return read(batch)
        if taught.any():  # all ranks take part if any has a sequence for this teacher
            is_taught = batch.select_local(taught)
            for values, taught_values in zip(blank, read(batch.select(taught)), strict=True):
                values[is_taught] = taught_values
        return blank
