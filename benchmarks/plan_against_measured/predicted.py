"""What `rl-megatron plan` says that a rank of a case uses."""

from __future__ import annotations

from typing import cast

from benchmarks.plan_against_measured.cases import PROMPT_TOKENS, VOCAB_SIZE, Case
from benchmarks.plan_against_measured.memory import OfPhase, OfRank, Static
from rl_megatron.config.loading.load import load_config
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.phases import PhaseName
from rl_megatron.plan.run import count_use, run_phases
from rl_megatron.plan.workload import Workload


def predict(case: Case, rank: int) -> OfRank:
    """Return what the plan says of a rank. The process must not have started a device."""
    workload = Workload(
        load_config(case.configuration).first, case.world_size, VOCAB_SIZE, PROMPT_TOKENS, case.length - PROMPT_TOKENS,
        uses_reference="reference" in case.phases, recomputes_logprobs="logprobs" in case.phases,
    )  # fmt: skip
    if case.layers_are_extrapolated:
        uses = count_use(workload, rank).phases
        befores = [0, *(use.after_bytes for use in uses)]
    else:
        measured = run_phases(workload, rank, Ledger(), cast(tuple[PhaseName, ...], case.phases))
        uses, befores = tuple(each.use() for each in measured), [each.start_bytes for each in measured]
    found = {
        use.name: OfPhase(before, use.peak_bytes, use.after_bytes) for use, before in zip(uses, befores, strict=False)
    }
    peak = next(use for use in uses if use.name == "build").peak
    static = Static(peak.parameters, peak.gradients, peak.optimizer)
    return OfRank(static, {name: found[name] for name in case.phases})
