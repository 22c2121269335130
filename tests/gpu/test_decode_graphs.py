"""On a GPU, captured decoding steps draw the tokens of steps that are not, also after the weights have changed."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.generation.decode_graphs import CudaRecorder, DecodeGraphs
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded_replica import EmbeddedReplica
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.ongoing import Ongoing
from tests.gpu.test_refit import build_policy, in_a_fresh_process, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Counting(CudaRecorder):
    """It counts the graphs that were captured."""

    captured = 0

    def __call__(self, step):
        graph = super().__call__(step)
        self.captured += 1
        return graph


def completions(sampling: Sampling, records: bool) -> tuple[list, int]:
    """Return tokens and logprobs of sequences that end at different times, in two rounds with a step between them."""
    from rl_megatron.generation.completions import requests_of

    policy = build_policy("bf16", distributed=False)
    recorder, found = Counting(), []
    decoder = Decoder(EmbeddedReplica(policy), 8, DecodeGraphs(recorder) if records else None)
    for number in range(2):
        policy.finish_training()
        prompts = [[1 + index, 2, 3, *range(4, 4 + index)] for index in range(12)]
        requests = requests_of(prompts, sampling, seed=number)
        decoder.add([Ongoing(request) for request in requests])
        with decoder.active():
            while (ended := decoder.advance()) is not None:
                found += [(number, each.request_id, each.ids, each.logprobs) for each in ended]
        train(policy)
    return sorted(found), recorder.captured


@pytest.mark.parametrize("sampling", [Sampling(24, 0.0), Sampling(24, 0.9, 8, 0.9)], ids=["greedy", "drawn"])
def test_captured_steps_draw_the_same_tokens(sampling):
    wanted, _ = in_a_fresh_process(completions, sampling, False)
    found, captured = in_a_fresh_process(completions, sampling, True)
    assert captured >= 2
    assert [each[:3] for each in found] == [each[:3] for each in wanted]
    for (*_, one), (*_, other) in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-2, atol=2e-2)
