"""The gate between an engine and what is learnt from it."""

from dataclasses import dataclass, field

import pytest
import torch

from rl_megatron.algorithms.logprob_check import EngineMismatch, Gate
from rl_megatron.algorithms.synced_engine import FreshEngine
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.interfaces import Sampling
from tests.unit.algorithms.fakes import Characters, Scripted

RUN = Sampling(max_new_tokens=100, temperature=0.7)


@dataclass
class Trainer:
    """Says of every token what the scripted engine says, −1, and something else of some."""

    off: dict[tuple[int, int], float] = field(default_factory=dict)

    def get_logprobs(self, rollouts):
        logprobs = torch.full(rollouts["input_ids"].shape, -1.0)
        for (row, column), by in self.off.items():
            logprobs[row, column] += by
        return BatchedDataDict(logprobs=logprobs)


@dataclass
class Engine(Scripted):
    """Hands weights over when there are new ones."""

    fresh: bool = True
    samplings: list = field(default_factory=list)

    def update_weights(self):
        fresh, self.fresh = self.fresh, False
        return {"refit_bytes": 8.0} if fresh else {}

    def generate(self, prompts, sampling, seed):
        self.samplings.append(sampling)
        return super().generate(prompts, sampling, seed)


def gate(trainer, num_prompts=2, limit=0.01):
    return Gate(trainer, Characters(), RUN, num_prompts, limit)


def check(trainer, **kwargs):
    engine = Engine({"a": ["12", "34"], "bc": ["5"], "d": ["6"]})
    return gate(trainer, **kwargs).check(engine, [[97], [97], [98, 99], [100]]), engine


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
def test_past_the_limit_the_worst_are_named(by):
    with pytest.raises(EngineMismatch) as mismatch:
        check(Trainer({(1, 2): by, (0, 1): 0.001}))
    message = str(mismatch.value)
    assert "generation.gate_limit=0.01" in message and "over 5 tokens" in message
    worst = message.partition("worst: ")[2]
    assert worst.startswith("prompt 'bc' (row 1), token 1 '5': trainer ") and "engine -1.0000; prompt 'a'" in worst


def test_without_prompts_there_is_no_gate():
    figures, engine = check(Trainer({(0, 1): 9.0}), num_prompts=0)
    assert figures == {} and engine.calls == []


def test_a_fresh_engine_is_gated_after_every_refit_and_draws_the_present_weights():
    engine, noted = Engine({"a": list("123456")}), []
    fresh = FreshEngine(engine, gate(Trainer()), noted.append)

    def draw():
        fresh.generate([[97]], RUN, seed=5)
        seeds = [seed for _, seed in engine.calls]
        engine.calls.clear()
        return [seed == 5 for seed in seeds]  # the gate's own is another

    assert draw() == [False, True]
    assert draw() == [True]
    engine.fresh = True
    assert draw() == [False, True]
    figures = {"gate_mean": 0.0, "gate_p99": 0.0, "gate_max": 0.0}
    assert noted == [{"refit_bytes": 8.0}, figures] * 2


def test_an_engine_that_was_started_again_while_drawing_passes_the_gate_before_its_rollouts_are_used():
    class Restarted(Engine):
        def generate(self, prompts, sampling, seed):
            self.fresh |= len(self.calls) in restarts
            return super().generate(prompts, sampling, seed)

    for restarts, wanted in (([1], "gdgd"), ([0], "ggd"), ([1, 2], "gdggd"), ([1, 3], "gdgdgd")):
        engine, noted = Restarted({"a": list("123456")}), []
        rollouts = FreshEngine(engine, gate(Trainer()), noted.append).generate([[97]], RUN, seed=5)
        drawn = "".join("d" if seed == 5 else "g" for _, seed in engine.calls)
        assert drawn == wanted, "the gate's own, and the rollouts"
        assert rollouts["input_ids"][0, 1].item() == ord("123456"[len(wanted) - 1]), "the last that were drawn"
        assert [("refit_bytes" in figures) for figures in noted].count(True) == 1 + len(restarts)


def test_an_engine_without_refits_is_gated_once():
    engine, noted = Engine({"a": list("123")}, fresh=False), []
    fresh = FreshEngine(engine, gate(Trainer()), noted.append)
    for _ in range(2):
        fresh.generate([[97]], RUN, seed=5)
    assert len(noted) == 1 and "gate_max" in noted[0]


def test_behind_a_closed_gate_nothing_is_drawn():
    engine = Engine({"a": ["1", "2"]})
    fresh = FreshEngine(engine, gate(Trainer({(0, 1): 1.0})), lambda figures: None)
    for _ in range(2):
        with pytest.raises(EngineMismatch):
            fresh.generate([[97]], RUN, seed=5)
    assert len(engine.calls) == 2, "the gate's alone"
