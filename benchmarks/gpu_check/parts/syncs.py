"""How often the host waits for the GPU in a training step, in logprobs and while decoding, beside the plan.

torch counts on the GPU (`torch.cuda.set_sync_debug_mode`), and a plan counts without one. A microbatch may not
wait at all, besides for the number of tokens of each expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_check.measured import DeviceCounter, run_phases_on
from benchmarks.gpu_check.planned import workload_of
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process, key_of
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedReplica
from rl_megatron.generation.interfaces import Request, Sampling
from rl_megatron.generation.requests import PartialCompletion
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.phases import PhaseName
from rl_megatron.plan.rank_phases import PhaseCounter
from rl_megatron.plan.run import run_as_rank, run_phases
from rl_megatron.plan.workload import Workload
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy

PHASES: tuple[PhaseName, ...] = ("logprobs", "reference", "train")
PACKED = ("train.batching=packed", "train.micro_batch_tokens=256")
CASES = {
    "padded": ("train.batching=padded", "train.micro_batch_size=2"),
    "packed": PACKED,
    "packed, fused head": (*PACKED, "train.fused_head=true"),
    "recomputed": ("train.batching=padded", "train.micro_batch_size=2", "model.recompute=full"),
    "window": (*PACKED, "model.sliding_window=16"),
    "experts": (*PACKED, "model.num_experts=8", "model.experts_per_token=2", "model.expert_ffn_hidden_size=64"),
}
DECODING = "decoding"
# The results are read, and a step's metrics and gradient norm. Experts have an optimizer with a norm of its own.
ALLOWED = {"logprobs": 1, "reference": 1, "train": 2}
ALLOWED_PER_EIGHT_TOKENS = 1
OF_EXPERTS = "megatron/core/transformer/moe/"  # a layer with experts waits in each microbatch
_TOKENS, _SEQUENCES, _STEPS = 128, 6, 16

Places = dict[str, dict[str, int]]  # phase → place → how often


def rows(tiny: bool) -> list[str]:
    return [f"waits of 'train', {name}" for name in _cases(tiny)] + [f"waits of {_STEPS} decoded tokens"]


def _cases(tiny: bool) -> list[str]:
    return ["packed, fused head", "experts"] if tiny else list(CASES)


def workload(case: str) -> Workload:
    """Return the work of a case. Its three microbatches are run one by one, and none is extrapolated."""
    model = ("model=nano", "model.num_layers=2")
    return workload_of((*model, *CASES[case]), vocab_size=1024, tokens=_TOKENS, sequences=_SEQUENCES, reference=True)


def run(setting: Setting, record: Record) -> None:
    cases = _cases(setting.tiny)
    planned = setting.expected(key_of_cases(cases), lambda: in_new_process(_planned, cases, sees_gpus=False))
    measured = in_new_process(_measured, cases, setting.device)
    for case, phases in planned.items():
        for phase, places in phases.items():
            check_allowed(record, "planned waits", phase, case, places)
    for name, case in zip(rows(setting.tiny), [*cases, DECODING], strict=True):
        if not setting.on_gpu:
            record.cannot([name], "only a GPU makes the host wait")
            continue
        for phase, places in measured[case].items():
            waits, expected = sum(places.values()), planned[case][phase]
            record.at_most(f"waits of '{phase}', {case}, beside the plan", waits, sum(expected.values()))
            check_allowed(record, "waits", phase, case, places)
            if unplanned := {place: count for place, count in places.items() if place not in expected}:
                record.fact(f"waits of '{phase}', {case}, that were not planned", str(unplanned))
        record.figure(name, sum(measured[case]["generate" if case == DECODING else "train"].values()))


def expect(setting: Setting) -> dict[str, Any]:
    cases = _cases(setting.tiny)
    return {key_of_cases(cases): in_new_process(_planned, cases, sees_gpus=False)}


def key_of_cases(cases: list[str]) -> str:
    return key_of("syncs", {case: workload(case) for case in cases}, _STEPS)


def check_allowed(record: Record, what: str, phase: str, case: str, places: dict[str, int]) -> None:
    """Check that a phase waits no more often than a phase may, expert layers left out."""
    found = sum(count for place, count in places.items() if not place.startswith(OF_EXPERTS))
    limit = ALLOWED_PER_EIGHT_TOKENS * _STEPS // 8 if phase == "generate" else ALLOWED[phase]
    record.at_most(f"{what} of '{phase}', {case}", found, limit + (phase == "train" and case == "experts"))


def _planned(cases: list[str]) -> dict[str, Places]:
    found = {}
    for case in cases:
        phases = run_phases(workload(case), 0, Ledger(), PHASES)
        found[case] = {each.name: dict(each.use().syncs) for each in phases if each.name in PHASES}
    ledger = Ledger()
    with run_as_rank(workload("padded"), 0, ledger) as layout:
        found[DECODING] = {"generate": decode(layout, ledger)}
    return found


def _measured(cases: list[str], device: str) -> dict[str, Places]:
    """Return the waits of a second time: in the first one kernels are compiled."""
    found = {}
    layout = topology.build(ParallelConfig(), start_device(device), 0)
    for case in cases:
        for _ in range(2):
            with DeviceCounter(layout.device) as counter:
                phases = run_phases_on(layout, workload(case), counter, PHASES)
        found[case] = {each.name: dict(each.use().syncs) for each in phases if each.name in PHASES}
    for _ in range(2):
        with DeviceCounter(layout.device) as counter:
            found[DECODING] = {"generate": decode(layout, counter)}
    dist.destroy_process_group()
    return found


def decode(layout: Topology, counter: PhaseCounter) -> dict[str, int]:
    """Return the waits of `_STEPS` steps of eight sequences on the embedded engine, by place."""
    work = workload("padded")
    policy = MegatronPolicy(work.stage.model, layout, vocab_size=work.vocab_size, precision="bf16")
    decoder = Decoder(EmbeddedReplica(policy), 8)
    sampling = Sampling(64, top_p=0.9, top_k=20)
    decoder.add([PartialCompletion(Request(f"{n}", (n,) * 32, sampling, n)) for n in range(8)])
    with torch.no_grad(), decoder.active():
        decoder.advance()  # reads the prompts
        decoder.advance()  # sends how the sequences are sampled
        with counter.phase("generate") as result:
            for _ in range(_STEPS):
                decoder.advance()
    policy.shutdown()
    return dict(result[0].use().syncs)
