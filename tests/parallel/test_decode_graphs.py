"""A decoder whose steps are recorded draws the tokens of one whose steps are not. A recorder stands for CUDA's."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.generation.decode_graphs import DecodeGraphs, make_graphs
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedReplica
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.requests import PartialCompletion, make_requests
from tests.parallel.layouts import EXPERTS, MODEL, build_policy
from tests.parallel.test_generation import prompts

LENGTHS = [12, 3, 40, 1, 7, 12, 5, 33, 2, 9, 12]
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")


class NoWaits(TorchDispatchMode):
    """Refuses operators for which the host would wait for a GPU, and shapes that depend on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in WAITS), func
        if "aten.index.Tensor" in str(func):
            assert not any(index is not None and index.dtype is torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))


class Capture:
    """It stands for CUDA's capture: recording changes nothing, and a replay needs the same tensors and sampling."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        self.recorded = self.replayed = 0

    def __call__(self, step):
        self.recorded += 1
        fixed, tensors = self._fixed(), self._tensors()
        before = [tensor.clone() for tensor in tensors]
        with NoWaits():
            step()
        assert self._fixed() == fixed
        for tensor, values in zip(tensors, before, strict=True):
            tensor.copy_(values)

        def replay():
            self.replayed += 1
            assert self._fixed() == fixed
            step()

        return SimpleNamespace(replay=replay)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._decoder.slots.tensors(), *self._decoder.cache.tensors()]

    def _fixed(self) -> tuple[list[int], float]:
        """Return what a graph cannot change: the addresses of tensors, and the temperature of all sequences."""
        (temperature,) = {sequence.request.sampling.temperature for sequence in self._decoder.running}
        return [tensor.data_ptr() for tensor in self._tensors()], temperature


def completions(model: Any, samplings: list[Sampling], records: bool) -> tuple[dict, list[int], int]:
    """Return what each request got, how many steps each round recorded, and how many were replayed.

    In the first round, slots grow after a step was recorded that is then needed again, sequences end and others take
    their slots, and two are aborted. Then the weights change in place, and longer prompts need more cache.
    """
    policy = build_policy({}, model=model)
    decoder = Decoder(EmbeddedReplica(policy), 3)
    capture = Capture(decoder)
    decoder.graphs = DecodeGraphs(capture) if records else None
    first = [
        replace(request, sampling=replace(sampling, max_new_tokens=length))
        for request, sampling, length in zip(
            make_requests(prompts()[: len(LENGTHS)], samplings[0], seed=3), cycle(samplings), LENGTHS, strict=False
        )
    ]
    later = [
        replace(request, request_id=f"later {place}")
        for place, sampling in enumerate(samplings)
        for request in make_requests([[5, 6, 7, 8] * 12], replace(sampling, max_new_tokens=20), seed=5)
    ]
    ended: list = []
    recorded = []
    again = replace(first[1], request_id="again")
    for batches in ([first[1:2], first[:1] + first[2:], [again]], *([[each]] for each in later)):
        recorded.append(-capture.recorded)
        with decoder.active():
            for batch in batches:
                decoder.add([PartialCompletion(each) for each in batch])
                while (more := decoder.advance()) is not None:
                    ended += more
                    if len(ended) == 4:
                        ended += decoder.abort({sequence.request.request_id for sequence in decoder.running[:2]})
        recorded[-1] += capture.recorded
        with torch.no_grad():
            for parameter in policy.model.model_chunks[0].parameters():
                parameter.mul_(0.9)
    found = {each.request_id: (each.reason, each.ids, each.logprobs) for each in ended}
    return found, recorded, capture.replayed


GREEDY, DRAWN = Sampling(1, temperature=0.0), Sampling(1, 0.9)


@pytest.mark.parametrize("samplings", [[GREEDY], [DRAWN], [GREEDY, DRAWN]], ids=["greedy", "drawn", "mixed"])
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, sliding_window=4)], ids=["plain", "window"])
def test_recorded_steps_draw_the_same_tokens(ranks, model, samplings):
    wanted, *_ = ranks.run(1, completions, model, samplings, False)[0]
    found, recorded, replayed = ranks.run(1, completions, model, samplings, True)[0]
    assert found.keys() == wanted.keys() and "later 0" in found
    assert [reason for reason, *_ in found.values()].count("abort") == 2
    for name, (reason, ids, logprobs) in found.items():
        assert (reason, ids) == wanted[name][:2], name
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(wanted[name][2]), rtol=1e-5, atol=1e-5)
    assert all(recorded) and replayed > sum(recorded)  # also after the cache was enlarged


def reasons() -> list[str | None]:
    return [EmbeddedReplica(build_policy({}, model=model)).why_not_captured for model in (MODEL, EXPERTS)]


def test_models_with_experts_are_not_captured(ranks):
    plain, experts = ranks.run(1, reasons)[0]
    assert plain is None and "experts" in str(experts)
    assert make_graphs(SimpleNamespace(device=torch.device("cuda"), why_not_captured=experts), "auto") is None
