"""A decoder whose steps are recorded draws the tokens of one whose steps are not. A recorder stands for CUDA's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.generation.completions import requests_of
from rl_megatron.generation.decode_graphs import DecodeGraphs, graphs_for
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded_replica import EmbeddedReplica
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.ongoing import Ongoing
from tests.parallel.layouts import EXPERTS, MODEL, build_policy
from tests.parallel.test_generation import prompts

pytestmark = pytest.mark.quick
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
    """It stands for CUDA's capture: a step that is recorded changes nothing, and a replay needs the same tensors."""

    def __init__(self, tensors: Any):
        self._tensors = tensors
        self.recorded = self.replayed = 0

    def __call__(self, step):
        self.recorded += 1
        tensors, before = self._tensors(), [tensor.clone() for tensor in self._tensors()]
        with NoWaits():
            step()
        assert [tensor.data_ptr() for tensor in self._tensors()] == [tensor.data_ptr() for tensor in tensors]
        for tensor, values in zip(tensors, before, strict=True):
            tensor.copy_(values)

        def replay():
            self.replayed += 1
            assert [tensor.data_ptr() for tensor in self._tensors()] == [tensor.data_ptr() for tensor in tensors]
            step()

        return SimpleNamespace(replay=replay)


def completions(model: Any, sampling: Sampling, records: bool) -> tuple[dict, tuple[int, int]]:
    """Return the tokens and logprobs of each request, and how many steps were recorded and replayed.

    Sequences end and others take their slots; then the weights change in place, and a longer prompt needs more cache.
    """
    policy = build_policy({}, model=model)
    decoder = Decoder(EmbeddedReplica(policy), 3)
    capture = Capture(lambda: [*decoder.slots.tensors(), *decoder.cache.tensors()])
    decoder.graphs = DecodeGraphs(capture) if records else None
    requests = requests_of(prompts()[: len(LENGTHS)], sampling, seed=3)
    pairs = zip(requests, LENGTHS, strict=True)
    first = [replace(each, sampling=replace(sampling, max_new_tokens=length)) for each, length in pairs]
    (later,) = requests_of([[5, 6, 7, 8] * 12], replace(sampling, max_new_tokens=20), seed=5)
    ended: list = []
    for batch in (first, [replace(later, request_id="later")]):
        decoder.add([Ongoing(each) for each in batch])
        with decoder.active():
            while (more := decoder.advance()) is not None:
                ended += more
        with torch.no_grad():
            for parameter in policy.model.model_chunks[0].parameters():
                parameter.mul_(0.9)
    return {each.request_id: (each.ids, each.logprobs) for each in ended}, (capture.recorded, capture.replayed)


@pytest.mark.parametrize("sampling", [Sampling(1, temperature=0.0), Sampling(1, 0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, sliding_window=4)], ids=["plain", "window"])
def test_recorded_steps_draw_the_same_tokens(ranks, model, sampling):
    wanted, _ = ranks.run(1, completions, model, sampling, False)[0]
    found, (recorded, replayed) = ranks.run(1, completions, model, sampling, True)[0]
    assert found.keys() == wanted.keys() and "later" in found
    for name, (ids, logprobs) in found.items():
        assert ids == wanted[name][0], name
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(wanted[name][1]), rtol=1e-5, atol=1e-5)
    assert replayed > recorded > 1


def reasons() -> list[str | None]:
    return [EmbeddedReplica(build_policy({}, model=model)).why_not_captured for model in (MODEL, EXPERTS)]


def test_models_with_experts_are_not_captured(ranks):
    plain, experts = ranks.run(1, reasons)[0]
    assert plain is None and "experts" in str(experts)
    assert graphs_for(SimpleNamespace(device=torch.device("cuda"), why_not_captured=experts), "auto") is None
