"""The microbatches of a plan are those that the planner of a real run makes of equal sequences."""

from __future__ import annotations

import pytest

from rl_megatron.batching.config import Batching
from rl_megatron.batching.rank_plan import plan_lengths
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.plan import PlanConfig
from rl_megatron.plan.closed_forms import logits_bytes
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.estimate import apply_mean_lengths, estimate_step
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.run import run_phases
from rl_megatron.plan.settings import Settings
from rl_megatron.plan.workload import MicrobatchSizes, Workload
from rl_megatron.topology.degrees import ConfiguredLayout
from tests.unit.plan.planned import EXPERTS, workload

LENGTH = 8
CLUSTER = Cluster.from_config(PlanConfig(), "h100", 1, 8)


def planned_by_the_run(sequences: int, data: int, kind, budget: int, group_size: int) -> list[list[int]]:
    """Return the sequences of each microbatch of each data-parallel rank, without those of one token."""
    batching = Batching(kind, sequences=budget // LENGTH, tokens=budget)
    layout = ConfiguredLayout(data, 1, 1)
    plan = plan_lengths([LENGTH] * sequences, LENGTH, batching, layout, data, group_size)
    if kind == "padded":  # padding sequences are as wide as others
        return [[len(chosen) for chosen in shard] for shard in plan.plan.sequences]
    return [
        [slots // LENGTH for slots in shard if slots >= LENGTH] for shard in plan.plan.slots
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "group_size"), [("padded", 1), ("dynamic", 1), ("dynamic", 2), ("packed", 1), ("packed", 2)]
)
@pytest.mark.parametrize("data", [1, 3, 4])
def test_microbatches_are_those_of_the_rank_with_the_most_sequences(kind, data, group_size):
    for most in (1, 2, 3, 8):
        budget, most = most * group_size * LENGTH, most * group_size
        for groups in range(1, 30):
            sequences = groups * group_size
            found = planned_by_the_run(sequences, data, kind, budget, group_size)
            expected = sorted(found[0], reverse=True)
            assert sum(expected) == max(map(sum, found))  # the rank that a plan runs as has the most
            sizes = MicrobatchSizes.from_sequences(sequences, data, most, kind, group_size=group_size)
            counts = [size for size, count in sizes.counts for _ in range(count)]
            assert counts == expected, (most, sequences)


PACKED = ("train.batching=packed", "train.micro_batch_tokens=512")  # 8 sequences of 64 tokens
SHARED = "train.share_prefixes=auto"
SFT = ("algorithm=sft", "data=arithmetic", "model=nano", "+model.vocab_size=1024", "precision=bf16")


def estimated(world_size: int, sequences: int, *overrides: str):
    """Return the FLOPs of training on a rank, and the estimate of a step, of a global batch of so many sequences."""
    settings = Settings.from_workload(sft(world_size, sequences, *overrides))
    use = estimate_use(settings, 0)
    train = next(phase for phase in use.phases if phase.name == "train")
    return train.flops, estimate_step([use], settings, CLUSTER)


def sft(world_size: int, sequences: int, *overrides: str):
    stage = load_config([*SFT, *PACKED, *overrides, f"train.global_batch_size={sequences}"]).first
    return Workload(stage, world_size, 1024, prompt_tokens=32, response_tokens=32)


def test_ten_sequences_in_packs_of_eight_take_as_much_as_ten():
    assert sft(1, 10).microbatches_of_step.counts == ((5, 2),)
    of_one, ten, sixteen = (estimated(1, sequences)[0] for sequences in (1, 10, 16))
    assert (ten, sixteen) == (10 * of_one, 16 * of_one)


def test_ranks_without_sequences_neither_learn_from_tokens_nor_raise_the_mfu():
    (few_flops, few), (_, many) = estimated(8, 8), estimated(64, 8)
    assert sft(64, 8).idle_ranks == 56 and sft(8, 8).idle_ranks == 0
    assert estimated(64, 8)[0] == few_flops  # a rank that has a sequence
    assert many.tokens_per_second == pytest.approx(8 * 64 / many.seconds)
    assert few.tokens_per_second == pytest.approx(8 * 64 / few.seconds)
    assert many.mfu * many.phases["train"].total == pytest.approx(few.mfu * few.phases["train"].total / 8)


def test_padding_sequences_of_a_padded_microbatch_are_computed_and_not_learned_from():
    padded = ("train.batching=padded", "train.micro_batch_size=8")
    (of_ten, ten), (of_sixteen, sixteen) = (estimated(1, sequences, *padded) for sequences in (10, 16))
    assert of_ten == of_sixteen and ten.seconds == sixteen.seconds
    assert ten.tokens_per_second == pytest.approx(10 / 16 * sixteen.tokens_per_second)
    assert ten.mfu == pytest.approx(10 / 16 * sixteen.mfu)


def test_the_last_optimizer_step_of_a_rollout_may_have_fewer_sequences():
    work = workload(1, *PACKED, "train.global_batch_size=12", "algorithm.updates_per_rollout=2")
    assert work.optimizer_batches == [(12, 2), (4, 2)]  # 4 prompts of 4 samples
    assert work.microbatches_of_rollout.counts == ((8, 2),) and work.optimizer_steps == 4
    batches = Settings.from_workload(work).batches
    assert batches.learned_sequences == 32 and batches.training.tokens == 32 * 64


def test_an_interleaved_pipeline_is_filled_up_with_its_shortest_microbatch():
    sizes = MicrobatchSizes.from_sequences(11, 1, 4, "packed", multiple=4)
    assert sizes.counts == ((4, 2), (3, 2)) and sizes.sequences == 14


def _uneven_run():
    """Return the FLOPs of training and logprobs: run, and by closed forms."""
    work = workload(
        1, *PACKED, "algorithm.prompts_per_step=15", "algorithm.samples_per_prompt=2", "train.global_batch_size=30",
    )  # fmt: skip
    assert work.microbatches_of_step.counts == ((8, 2), (7, 2))
    return _flops_of(work)


def _shared_run():
    """Return the same if samples share their prompts."""
    work = workload(1, *PACKED, "algorithm.prompts_per_step=15", "train.global_batch_size=60", SHARED)
    sizes = work.microbatches_of_step
    assert sizes.counts == ((12, 5),) and sizes.trees == ((4, 4, 4),)
    return _flops_of(work)


def _flops_of(work):
    run = {each.name: each.use() for each in run_phases(work, 0, Ledger(), ("logprobs", "train"))}
    closed = {phase.name: phase for phase in estimate_use(Settings.from_workload(work), 0).phases}
    return [(run[name].flops, closed[name].flops) for name in ("logprobs", "train")]


@pytest.mark.change
def test_shared_prompts_take_the_operations_that_closed_forms_count(fresh_process):
    for run, closed in fresh_process.run(_shared_run):
        assert run == closed


def test_shared_prompts_are_computed_once():
    grpo = (*PACKED, "algorithm.prompts_per_step=16", "train.global_batch_size=64")
    whole, shared = (Settings.from_workload(workload(1, *grpo, *extra)) for extra in ((), (SHARED,)))
    assert whole.batches.training.tokens == 64 * 64
    assert shared.batches.training.tokens == shared.batches.rollout.tokens == 16 * (31 + 4 * 33)
    assert shared.batches.learned_sequences == whole.batches.learned_sequences
    of_whole, of_shared = (estimate_step([estimate_use(each, 0)], each, CLUSTER) for each in (whole, shared))
    assert of_shared.phases["train"].total < of_whole.phases["train"].total


def test_an_interleaved_pipeline_is_filled_up_with_its_smallest_tree():
    sizes = MicrobatchSizes.from_shared({(4, 4): 2, (4, 2): 1}, multiple=4)
    assert sizes.counts == ((8, 2), (6, 2)) and sizes.trees == ((4, 4), (4, 2))


@pytest.mark.change
def test_a_run_of_fewer_microbatches_gives_the_operations_of_an_uneven_batch(fresh_process):
    for run, closed in fresh_process.run(_uneven_run):
        assert run == closed


def test_shorter_mean_responses_take_fewer_and_smaller_collectives_run_or_not():
    tensor = ("parallel.tensor=2", "parallel.sequence=true")
    work = workload(2, *PACKED, *tensor, "algorithm.prompts_per_step=16", "train.global_batch_size=64")
    longest, mean = Settings.from_workload(work), Settings.from_workload(work, 8)
    share = (32 + 8) / (32 + 32)
    closed, whole = estimate_use(mean, 0), estimate_use(longest, 0)
    for shorter in (closed, apply_mean_lengths(whole, mean)):
        for name, of_bytes in (("train", share), ("logprobs", share), ("generate", 8 / 32)):
            few, many = (next(phase for phase in use.phases if phase.name == name) for use in (shorter, whole))
            amounts = [
                sum(each.bytes * each.count for each in phase.collectives if each.group == "tensor")
                for phase in (few, many)
            ]
            assert amounts[0] == pytest.approx(of_bytes * amounts[1], rel=1e-3), name
            assert few.kernels < 0.7 * many.kernels, name
    gradients = [
        [each for each in use.phases[-2].collectives if each.group == "data"]
        for use in (apply_mean_lengths(whole, mean), whole)
    ]
    assert gradients[0] == gradients[1]


def test_a_mean_above_the_longest_response_is_refused():
    with pytest.raises(ConfigError, match=r"plan.mean_response_tokens=33 exceeds .*plan.response_tokens=32; lower"):
        Settings.from_workload(sft(1, 8), 33)


def of_phase(work: Workload, stage: int, name: str):
    return next(phase for phase in estimate_use(Settings.from_workload(work), stage).phases if phase.name == name)


def test_every_rank_fills_buckets_of_the_whole_model_in_any_layout():
    processes = ("generation.engine=transformers",)
    whole = of_phase(workload(1, *processes), 0, "refit")
    (alone,) = whole.collectives
    assert alone.count == 1 and whole.peak.buffers == alone.bytes  # one small bucket
    layouts = (("parallel.pipeline=2",), ("parallel.tensor=2",), (*EXPERTS, "parallel.expert=2"))
    for layout in layouts:
        size = next(each for each in of_phase(workload(2, *processes, *layout), 0, "refit").collectives).bytes
        experts = layout[:-1] if "expert" in layout[-1] else ()
        assert size == of_phase(workload(1, *processes, *experts), 0, "refit").collectives[0].bytes
    small = of_phase(workload(1, *processes, "generation.refit_bucket_mb=0.5"), 0, "refit")
    (sums,) = small.collectives
    assert sums.count > 2 and small.peak.buffers == 2**20
    assert sums.bytes * sums.count == pytest.approx(alone.bytes, rel=1e-3)


@pytest.mark.parametrize(("precision", "mebibytes"), [("bf16", 501), ("fp32", 1002)])
def test_a_token_block_of_the_fused_head_has_whole_thousands_of_tokens_in_any_precision(precision, mebibytes):
    shape = Settings.from_workload(sft(1, 8, "model.vocab_size=128256")).shape
    assert shape.vocab_shard == 128256
    found = logits_bytes(shape, tokens=8192, precision=precision, fused_head=True)
    assert found == 2048 * 128256 * (2 if precision == "bf16" else 4) == mebibytes * 2**20
    assert logits_bytes(shape, tokens=1000, precision=precision, fused_head=True) < found / 2


def test_stages_send_and_receive_activations_once_also_with_recomputation():
    def sent(stage: int, *overrides: str):
        train = of_phase(workload(4, "parallel.pipeline=4", *overrides), stage, "train")
        return {each.kind: each.count for each in train.collectives if each.group == "pipeline"}

    for overrides in ((), ("model.recompute=full",)):  # 8 microbatches of 2 sequences
        assert sent(0, *overrides) == {"send": 8, "recv": 8} == sent(3, *overrides)
        assert sent(1, *overrides) == {"send": 16, "recv": 16}


def _of_two_stages():
    """Return the use of a weight sync and of training: (run, by closed forms)."""
    work = workload(4, "generation.engine=transformers", "parallel.pipeline=2")
    run = {each.name: each.use() for each in run_phases(work, 0, Ledger(), ("refit", "train"))}
    return [(run[name], of_phase(work, 0, name)) for name in ("refit", "train")]


@pytest.mark.change
def test_a_run_of_a_pipeline_syncs_and_sends_as_much_as_the_closed_forms_say(fresh_process):
    refit, train = fresh_process.run(_of_two_stages)
    run, closed = (sum(each.bytes * each.count for each in use.collectives) for use in refit)
    assert run == pytest.approx(closed, rel=1e-3)  # besides the fingerprints
    run, closed = ({each for each in use.collectives if each.kind in ("send", "recv")} for use in train)
    assert run == closed and len(run) == 2
