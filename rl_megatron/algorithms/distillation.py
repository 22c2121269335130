"""Distillation: train a student on given answers towards a teacher's next-token distributions.

Source: Hinton et al. 2015, arXiv:1503.02531; generalised Jensen-Shannon divergence, Agarwal et al. 2023,
arXiv:2306.13649.
"""

from __future__ import annotations

from rl_megatron.algorithms.registry import LossNeeds, register_algorithm
from rl_megatron.algorithms.teachers import TOPK_KEYS, WHOLE_KEYS, Teachers, check_each_teacher, uses_teacher
from rl_megatron.batching.batch import DATA_SET
from rl_megatron.config.algorithms import DistillationConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.loader import DataLoader
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import check_dataset
from rl_megatron.losses.registry import configured_loss
from rl_megatron.rollouts.batch import index_data_sets
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy

_KEYS = frozenset("input_ids input_lengths token_mask sample_mask".split()) | TOPK_KEYS | WHOLE_KEYS
_LOSS = LossNeeds("a teacher's logits", uses_teacher, _KEYS, "full_distillation or distillation")


def _check_data(stage: StageConfig, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    algorithm: DistillationConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    lengths = list(check_dataset(stage, tokenizer))
    check_each_teacher(algorithm.teachers, stage, tokenizer, lengths, algorithm.top_k)
    return lengths


@register_algorithm(DistillationConfig, loss=_LOSS, check_data=_check_data)
def distillation(
    loop: Loop, policy: MegatronPolicy, data: DataLoader[BatchedDataDict], algorithm: DistillationConfig
) -> None:
    """Train the policy, which is the student, to match its teachers' next-token distributions."""
    loss_fn = configured_loss(loop.config.loss)
    teachers = Teachers.load(loop, policy, algorithm.teachers, algorithm.top_k)
    whole = teachers.find_whole_teacher(loss_fn)
    mixture = [data_set.shown_name for data_set in loop.config.data.mix]
    for step, batch in loop.batches(data):
        if mixture:
            batch.facts[DATA_SET] = index_data_sets(data.data_sets, mixture)
        batch = teachers.add_topk(batch, loss_fn)
        loop.record(step, loop.train(step, batch, loss_fn, teacher=whole))
