"""The comparison of an engine with the trainer, and the engine that generates only after it."""

import asyncio
from dataclasses import dataclass, field

import pytest
import torch

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import EngineFailed, Request, Sampling, Served
from rl_megatron.generation.logprob_check import EngineMismatch, LogprobCheck
from rl_megatron.generation.requests import derive_seed
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.topology.ranks import Ranks
from tests.unit.algorithms.fakes import Characters, Scripted, completed

RUN = Sampling(max_new_tokens=100, temperature=0.7)


@dataclass
class Trainer:
    """A policy that gives every token the logprob of the scripted engine, −1, and another to some."""

    off: dict[tuple[int, int], float] = field(default_factory=dict)

    def get_logprobs(self, rollouts):
        logprobs = torch.full(rollouts["input_ids"].shape, -1.0)
        for (row, column), by in self.off.items():
            logprobs[row, column] += by
        return BatchedDataDict(logprobs=logprobs)


@dataclass
class Engine(Scripted):
    """An engine that syncs weights when `behind` says that it is behind the policy or has restarted."""

    behind: bool = True
    served: Served | None = None
    syncs: int = 0
    samplings: list = field(default_factory=list)

    def sync(self):
        if not self.behind:
            return {}
        self.behind, self.syncs = False, self.syncs + 1
        self.served = Served(version=self.syncs)
        return {"refit_bytes": 8.0}

    def complete(self, requests):
        self.samplings.append(requests[0].sampling)
        return super().complete(requests)


def check_of(trainer, num_prompts=2, limit=0.01):
    return LogprobCheck(trainer, Characters(), RUN, num_prompts, limit)


def check(trainer, **kwargs):
    engine = Engine({"a": ["12", "34"], "bc": ["5"], "d": ["6"]})
    return check_of(trainer, **kwargs).run(engine, [[97], [97], [98, 99], [100]]), engine


def test_the_first_different_prompts_are_compared_with_few_tokens_at_the_runs_temperature():
    figures, engine = check(Trainer({(1, 3): 0.005}))
    assert engine.calls[0][0] == ["a", "bc"]
    assert (engine.samplings[0].temperature, engine.samplings[0].max_new_tokens) == (0.7, 16)
    # "12" and its end, "5" and its end: five tokens.
    assert figures == pytest.approx({"gate_mean": 0.001, "gate_p99": 0.005, "gate_max": 0.005}, rel=1e-4)


def test_prompts_and_padding_are_not_compared():
    figures, _ = check(Trainer({(0, 0): 9.0, (1, 0): 9.0, (1, 1): 9.0}))
    assert figures["gate_max"] == 0


@pytest.mark.parametrize("by", [0.06, -0.06, float("nan"), float("-inf")])
def test_above_the_limit_the_worst_tokens_are_named(by):
    with pytest.raises(EngineMismatch) as mismatch:
        check(Trainer({(1, 2): by, (0, 1): 0.001}))
    message = str(mismatch.value)
    assert "generation.gate_limit=0.01" in message and "over 5 tokens" in message
    worst = message.partition("worst: ")[2]
    assert worst.startswith("prompt 'bc' (sequence 1), token 1 '5': trainer ") and "engine -1.0000; prompt 'a'" in worst


def test_without_prompts_nothing_is_checked():
    figures, engine = check(Trainer({(0, 1): 9.0}), num_prompts=0)
    assert figures == {} and engine.calls == []


def synced(engine, trainer, noted):
    """Return a SyncedEngine that adds the metrics it is asked to note to `noted`, empty ones left out."""
    return SyncedEngine(engine, check_of(trainer), Ranks(), lambda metrics: noted.extend([metrics] * bool(metrics)))


def test_completions_without_routed_experts_are_refused_if_they_are_to_be_replayed():
    wrapped = SyncedEngine(
        Engine({"a": list("123456")}), check_of(Trainer()), Ranks(), lambda metrics: None, needs_routing=True
    )
    with pytest.raises(EngineFailed, match="no routed experts came with the completions"):
        generate(wrapped, [[97]], RUN, seed=5)


def test_a_single_request_keeps_its_prompt_its_sampling_and_its_seed():
    asked = []

    class TakesRequests(Engine):
        async def submit(self, request):
            asked.append(request)
            return completed(request, [97])

    request = Request("7-0", (97, 98), RUN, 1234)
    found = asyncio.run(synced(TakesRequests({}), Trainer(), []).submit(request))
    assert asked == [request] and found.ids == (97,)


def test_an_engine_that_takes_no_single_requests_is_refused_when_one_comes():
    with pytest.raises(EngineFailed, match="it has no method `submit`; set rollout.async_enabled=false"):
        asyncio.run(synced(Engine({}), Trainer(), []).submit(Request("7-0", (97,), RUN, 1)))


def calls_of(engine):
    """Return what the engine was asked for since the last call: "c" for the check, "g" for the caller's completions."""
    asked = "".join("g" if seed == derive_seed(5, 0) else "c" for _, seed in engine.calls)
    engine.calls.clear()
    return asked


def test_a_synced_engine_is_checked_after_every_weight_sync_and_not_otherwise():
    engine, noted = Engine({"a": list("123456")}), []
    wrapped = synced(engine, Trainer(), noted)

    def calls() -> str:
        generate(wrapped, [[97]], RUN, seed=5)
        return calls_of(engine)

    assert calls() == "cg"
    assert calls() == "g"
    engine.behind = True
    assert calls() == "cg"
    figures = {"gate_mean": 0.0, "gate_p99": 0.0, "gate_max": 0.0}
    assert noted == [{"refit_bytes": 8.0}, figures] * 2
    assert wrapped.served == Served(version=2)


@pytest.mark.parametrize(("restarts", "asked"), [([1], "cgcg"), ([0], "ccg"), ([1, 2], "cgccg"), ([1, 3], "cgcgcg")])
def test_an_engine_that_restarts_while_it_generates_is_checked_before_its_rollouts_are_used(restarts, asked):
    """`restarts`: the calls of `complete` in which the engine restarts, and gets the same version of the weights."""

    class Restarting(Engine):
        def complete(self, requests):
            if len(self.calls) in restarts:
                self.served = Served(self.served.version, self.served.start + 1)
            return super().complete(requests)

    engine, noted = Restarting({"a": list("123456")}), []
    rollouts = generate(synced(engine, Trainer(), noted), [[97]], RUN, seed=5)
    assert calls_of(engine) == asked
    assert rollouts["input_ids"][0, 1].item() == ord("123456"[len(asked) - 1]), "the last ones"
    assert ["gate_mean" in metrics for metrics in noted].count(True) == asked.count("c")


def test_the_control_flow_does_not_depend_on_the_metrics_of_a_sync():
    class Quiet(Engine):
        def sync(self):
            super().sync()
            return {}

    engine = Quiet({"a": list("123456")})
    wrapped = synced(engine, Trainer(), [])
    generate(wrapped, [[97]], RUN, seed=5)
    engine.behind = True
    generate(wrapped, [[97]], RUN, seed=5)
    assert calls_of(engine) == "cgcg"


def test_an_engine_without_weights_of_its_own_is_checked_once():
    engine, noted = Engine({"a": list("123")}, behind=False, served=Served(version=None)), []
    wrapped = synced(engine, Trainer(), noted)
    for _ in range(2):
        generate(wrapped, [[97]], RUN, seed=5)
    assert len(noted) == 1 and "gate_max" in noted[0]


def test_nothing_is_generated_for_the_caller_until_the_check_passes():
    engine = Engine({"a": ["1", "2"]})
    wrapped = synced(engine, Trainer({(0, 1): 1.0}), [])
    for _ in range(2):
        with pytest.raises(EngineMismatch):
            generate(wrapped, [[97]], RUN, seed=5)
    assert calls_of(engine) == "cc"


def test_an_engine_that_serves_nothing_after_a_sync_is_refused():
    engine = Engine({"a": ["1"]}, behind=False)
    with pytest.raises(EngineFailed, match="serves no weights"):
        generate(synced(engine, Trainer(), []), [[97]], RUN, seed=5)
    assert calls_of(engine) == ""
