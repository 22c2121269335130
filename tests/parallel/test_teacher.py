"""A student learns from a frozen teacher of another size, on shards as in one process, and as plain torch has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state

from rl_megatron.algorithms.teachers import Teachers
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.config.teachers import TeacherConfig
from rl_megatron.losses import build_loss
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.training.teacher import Teacher, load_teacher
from tests.parallel.layouts import MODEL, VOCAB_SIZE, build_policy, gradients, worst_relative_error
from tests.parallel.test_layouts import random_batch
from tests.unit.algorithms.test_endpoint_teacher import batch as endpoint_batch
from tests.unit.algorithms.test_endpoint_teacher import served

TEACHER = replace(MODEL, hidden_size=48, num_layers=2, init_std=0.15)
PACKED = Batching("packed", tokens=64)
PADDED = Batching(sequences=4)
FULL = {"kl_type": "mixed", "mixed_kl_weight": 0.3, "nll_weight": 0.2}
JSD = {"kl_type": "jensen_shannon", "jsd_beta": 0.3}
# The number of ranks, the layout, and whether sequences are packed.
LAYOUTS = [
    pytest.param(2, {"tensor": 2}, False, id="tensor"),
    pytest.param(2, {"context": 2}, True, id="context-packed", marks=pytest.mark.fast),
    pytest.param(2, {"tensor": 2, "sequence": True}, True, id="sequence-packed"),
    pytest.param(2, {"pipeline": 2}, True, id="pipeline-packed"),
]


def teacher_of(policy) -> Teacher:
    return Teacher(ShardedModel(TEACHER, policy.topology, vocab_size=VOCAB_SIZE, seed=7))


def learned(parallel: dict, packed: bool, loss: str, settings: dict):
    """Return (metrics, gradients on rank 0, logprobs of the teacher) of one global batch."""
    policy = build_policy(parallel, batching=PACKED if packed else PADDED)
    teacher, batch = teacher_of(policy), random_batch(6, 14, 2)
    logprobs = teacher.logprobs(Batch.from_whole(batch), policy.batching)
    if loss == "distillation":
        logits, ids = teacher.topk_logits(Batch.from_whole(batch), VOCAB_SIZE, policy.batching)
        batch["teacher_topk_logits"], batch["teacher_topk_indices"] = logits, ids
        metrics = policy.accumulate_gradients(batch, build_loss(loss, settings))
    else:
        metrics = policy.accumulate_gradients(batch, build_loss(loss, settings), teacher=teacher)
    return metrics, gradients(policy), logprobs


def by_definition(settings: dict):
    """Return the metrics of one process from both models' whole logits, in fp64."""
    policy = build_policy({}, batching=PADDED)
    batch = random_batch(6, 14, 2)
    whole = []
    for values in (
        policy.get_topk_logits(batch, VOCAB_SIZE).values(),
        teacher_of(policy).topk_logits(Batch.from_whole(batch), VOCAB_SIZE, policy.batching),
    ):
        logits, ids = values
        whole.append(torch.zeros(*ids.shape).scatter(-1, ids, logits).double() / 0.8)
    log_q, log_p = (logits[:, :-1].log_softmax(-1) for logits in whole)
    q, p, beta = log_q.exp(), log_p.exp(), settings.get("jsd_beta", 0.5)
    log_m = (beta * p + (1 - beta) * q).log()
    terms = {
        "forward_kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jensen_shannon": (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1),
        "nll": -log_q.gather(-1, batch["input_ids"][:, 1:, None])[..., 0],
    }
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
    return {name: ((term * mask).sum() / mask.sum()).item() for name, term in terms.items()}


def assert_equal_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that the whole gradient agrees to 1e-6 of its norm, and each parameter's to 1e-5 of its largest entry."""
    error, where = worst_relative_error(found, wanted)
    assert error < 1e-5, where
    difference, norm = (
        torch.cat([values.double().flatten() for values in of.values()]).norm()
        for of in ({name: found[name].double() - wanted[name].double() for name in wanted}, wanted)
    )
    assert norm > 1e-2 and difference <= 1e-6 * norm, difference / norm


@pytest.mark.fast
@pytest.mark.parametrize("settings", [FULL, JSD], ids=["mixed", "jensen-shannon"])
def test_the_loss_is_what_both_models_whole_logits_give(ranks, settings):
    metrics, found, _ = ranks.reference(learned, {}, False, "full_distillation", settings)
    want = ranks.reference(by_definition, settings)
    for name in set(metrics) & set(want):
        assert metrics[name] == pytest.approx(want[name], rel=1e-6, abs=1e-6), name
        assert want[name] > 0.01
    # The other loss is given the whole vocabulary as the teacher's top-k, and its formulas are autograd's.
    _, other, _ = ranks.reference(learned, {}, False, "distillation", settings)
    assert_equal_gradients(found, other)


@pytest.mark.parametrize(("world", "parallel", "packed"), LAYOUTS)
@pytest.mark.parametrize("settings", [FULL, JSD], ids=["mixed", "jensen-shannon"])
def test_a_sharded_student_and_teacher_equal_one_process(ranks, world, parallel, packed, settings):
    want, want_gradients, want_logprobs = ranks.reference(learned, {}, False, "full_distillation", settings)
    answers = ranks.run(world, learned, parallel, packed, "full_distillation", settings)
    for metrics, _, logprobs in answers:
        for name in want:
            assert metrics[name] == pytest.approx(want[name], rel=1e-6, abs=1e-6), name
        torch.testing.assert_close(logprobs, want_logprobs, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(answers[0][1], want_gradients)


def learned_by_data(student: dict, teacher: dict | None, packed: bool, directory: str, alone: bool = False):
    """Return (metrics, gradients on rank 0, logprobs) of a batch of two data sets with a teacher each.

    Args:
        student: The student's layout.
        teacher: The layout of the second teacher; None: the student's.
        packed: Whether sequences are packed.
        directory: Where the checkpoint of the second teacher is.
        alone: Whether the sequences of the second data set are all on one rank, so that another has none.
    """
    policy = build_policy(student, batching=PACKED if packed else PADDED)
    own = None if teacher is None else ParallelConfig(**teacher)
    second = load_teacher(
        TeacherConfig(path=f"{directory}/step-000001", parallel=own), policy.topology, VOCAB_SIZE, "fp32", None
    )
    first = Teacher(ShardedModel(TEACHER, policy.topology, vocab_size=VOCAB_SIZE, seed=11))
    teachers = Teachers([first, second], [0.5, 0.5], policy.batching, VOCAB_SIZE, [(0,), (1,)])
    whole = random_batch(6, 14, 2)
    whole["data_set"] = torch.tensor([0, 1, 0, 0, 0, 0] if alone else [0, 1, 0, 1, 1, 0])
    batch = Batch.gather_facts(whole if policy.topology.rank == 0 else None, policy.topology)
    batch = policy.distribute(batch, [6])
    logprobs = torch.zeros(6, batch.width)
    logprobs[batch.numbers] = teachers.logprobs(batch)
    loss = build_loss("distillation", FULL)
    metrics = policy.accumulate_gradients(teachers.add_topk(batch, loss), loss)
    has_some = bool((batch.select_local(batch.facts["data_set"]) == 1).any())
    return metrics, gradients(policy), logprobs, has_some


BY_DATA = {
    "data": (2, {}, None, False),
    "data packed": (2, {}, None, True),
    "a teacher of its own layout": (2, {}, {"tensor": 2}, False),
    "data and tensor": (4, {"tensor": 2}, None, True),
    "pipeline": (2, {"pipeline": 2}, None, True),
}


@pytest.mark.parametrize("alone", [False, True], ids=["spread", "one sequence"])
@pytest.mark.parametrize("layout", BY_DATA)
def test_teachers_by_data_give_what_they_give_in_one_process(ranks, tmp_path, layout, alone):
    world, student, teacher, packed = BY_DATA[layout]
    ranks.run(1, save_teacher, str(tmp_path))
    want, want_gradients, want_logprobs, _ = ranks.run(1, learned_by_data, {}, None, False, str(tmp_path), alone)[0]
    answers = ranks.run(world, learned_by_data, student, teacher, packed, str(tmp_path), alone)
    for metrics, *_ in answers:
        for name in want:
            assert metrics[name] == pytest.approx(want[name], rel=1e-6, abs=1e-6), name
    assert_equal_gradients(answers[0][1], want_gradients)
    copies = world if "pipeline" in student else student.get("tensor", 1)
    torch.testing.assert_close(sum(answer[2] for answer in answers) / copies, want_logprobs, rtol=1e-5, atol=1e-5)
    if alone and "pipeline" not in student:
        assert not all(has_some for *_, has_some in answers), "a rank has no sequence for the second teacher"


def save_teacher(directory: str) -> None:
    """Save the teacher's weights from one process as the checkpoint `step-000001`."""
    build_policy({}, model=TEACHER, seed=7).save_checkpoint(directory, 1)


def learned_across_layouts(student: dict, teacher: dict, directory: str):
    """Return what `learned` returns, with a checkpoint's teacher in its own layout. All tokens are its top-k."""
    policy = build_policy(student, batching=PADDED)
    config = TeacherConfig(path=f"{directory}/step-000001", parallel=ParallelConfig(**teacher))
    generator = torch.get_rng_state()
    beside = load_teacher(config, policy.topology, VOCAB_SIZE, "fp32", None)
    assert torch.equal(torch.get_rng_state(), generator)
    assert beside.model.topology.tensor == teacher.get("tensor", 1)
    batch = random_batch(6, 14, 2)
    logprobs = beside.logprobs(Batch.from_whole(batch), policy.batching)
    logits, ids = beside.topk_logits(Batch.from_whole(batch), VOCAB_SIZE, policy.batching)
    # megatron-core's own groups are the student's, as if there were no teacher.
    assert parallel_state.get_tensor_model_parallel_world_size() == student.get("tensor", 1)
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    batch["teacher_topk_logits"], batch["teacher_topk_indices"] = logits, ids
    metrics = policy.accumulate_gradients(batch, build_loss("distillation", FULL))
    return metrics, gradients(policy), logprobs


@pytest.mark.parametrize(
    ("student", "teacher"), [({}, {"tensor": 2}), ({"tensor": 2}, {}), ({"tensor": 2}, {"pipeline": 2})], ids=str
)
def test_a_checkpoint_as_a_teacher_in_its_own_layout_gives_the_same_gradients(ranks, tmp_path, student, teacher):
    want, want_gradients, want_logprobs = ranks.reference(learned, {}, False, "distillation", FULL)
    ranks.run(1, save_teacher, str(tmp_path))
    answers = ranks.run(2, learned_across_layouts, student, teacher, str(tmp_path))
    for metrics, _, logprobs in answers:
        for name in want:
            assert metrics[name] == pytest.approx(want[name], rel=1e-6, abs=1e-6), name
        torch.testing.assert_close(logprobs, want_logprobs, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(answers[0][1], want_gradients)


def logprobs_of_an_adapter(directory: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logprobs of a policy with a trained adapter, of its checkpoint as a teacher, and of the base."""
    model = replace(TEACHER, qkv_bias=False)  # adapters are merged by the table of a family, here Qwen3's
    base = build_policy({}, model=model, seed=7)
    policy = build_policy({}, model=model, seed=9, batching=PADDED, peft=LoraConfig(r=4, target_modules="all-linear"))
    policy.load_checkpoint(base.save_checkpoint(f"{directory}/base", 1), weights_only=True)
    batch = random_batch(6, 14, 2)
    for _ in range(2):
        policy.train(batch, build_loss("nll"), gbs=6)
    path = policy.save_checkpoint(f"{directory}/adapter", 1)
    teacher = load_teacher(TeacherConfig(path=str(path)), policy.topology, VOCAB_SIZE, "fp32", None)
    want, of_base = (each.get_logprobs(batch)["logprobs"] for each in (policy, base))
    return want, teacher.logprobs(Batch.from_whole(batch), policy.batching), of_base


def test_an_adapters_checkpoint_is_a_teacher_together_with_its_base(ranks, tmp_path):
    want, found, of_base = ranks.run(1, logprobs_of_an_adapter, str(tmp_path))[0]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert (want - of_base).abs().max() > 1e-3


def logprobs_of_a_teacher_with_dropout() -> list[torch.Tensor]:
    """Return the logprobs of a teacher, twice, whose adapter has dropout while it learns."""
    policy = build_policy({}, model=TEACHER, batching=PADDED, peft=LoraConfig(r=4, lora_dropout=0.5))
    batch = random_batch(6, 14, 2)
    for _ in range(2):
        policy.train(batch, build_loss("nll"), gbs=6)
    policy.prepare_for_training()
    teacher = Teacher(policy.model)
    return [teacher.logprobs(Batch.from_whole(batch), PADDED) for _ in range(2)]


def test_a_teacher_answers_without_dropout(ranks):
    first, second = ranks.run(1, logprobs_of_a_teacher_with_dropout)[0]
    assert torch.equal(first, second)


def answers_of_an_endpoint() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of tokens from a teacher behind a server that only rank 0 reaches, and its top-k."""
    topology = build_policy({}).topology
    faults = {} if topology.rank == 0 else {"no logprobs": True}
    with served(**faults) as (teacher, _):
        batch = Batch.from_whole(endpoint_batch())
        return teacher.logprobs(batch, PADDED), teacher.topk_logits(batch, 3, PADDED)[0]


def test_all_ranks_get_the_answers_of_an_endpoint(ranks):
    first, second = ranks.run(2, answers_of_an_endpoint)
    assert all(torch.equal(*answers) and answers[0].any() for answers in zip(first, second, strict=True))
