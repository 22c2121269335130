"""On a GPU, captured decoding steps draw the tokens of steps that are not, also after the weights have changed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rl_megatron.generation.decode_graphs import CudaRecorder, DecodeGraphs
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedReplica
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.requests import PartialCompletion
from tests.gpu.test_refit import build_policy, in_a_fresh_process, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Counting(CudaRecorder):
    """It counts the graphs that were captured."""

    captured = 0

    def __call__(self, step):
        graph = super().__call__(step)
        self.captured += 1
        return graph


def completions(sampling: Sampling, records: bool) -> tuple[list, list[int]]:
    """Return tokens and logprobs of sequences in three rounds, and the number of graphs that each round captured.

    Sequences end at different times. A step and an offload of the optimizer's state follow each round, and the last
    round needs more cache.
    """
    from rl_megatron.generation.requests import make_requests

    policy = build_policy("bf16", distributed=False)
    recorder, found, captured = Counting(), [], []
    decoder = Decoder(EmbeddedReplica(policy), 8, DecodeGraphs(recorder) if records else None)
    for number, longest in enumerate((4, 4, 100)):
        policy.finish_training()
        prompts = [[1 + index, 2, 3, *range(4, 4 + index)] + [5] * (longest - 4) for index in range(12)]
        requests = make_requests(prompts, sampling, seed=number)
        decoder.add([PartialCompletion(request) for request in requests])
        before = recorder.captured
        with decoder.active():
            while (ended := decoder.advance()) is not None:
                found += [(number, each.request_id, each.ids, each.logprobs) for each in ended]
        captured.append(recorder.captured - before)
        train(policy)
        policy.offload_after_refit()
    return sorted(found), captured


@pytest.mark.parametrize(
    "sampling",
    [Sampling(24, 0.0), Sampling(24, 0.9), Sampling(24, 0.9, top_p=0.9), Sampling(24, 0.9, 8, 0.9)],
    ids=["greedy", "drawn", "top_p", "top_k"],
)
def test_captured_steps_draw_the_same_tokens(sampling):
    wanted, _ = in_a_fresh_process(completions, sampling, False)
    found, captured = in_a_fresh_process(completions, sampling, True)
    assert captured[0] and captured[2]
    assert [each[:3] for each in found] == [each[:3] for each in wanted]
    for (*_, one), (*_, other) in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-2, atol=2e-2)


def bytes_after_captures() -> list[int]:
    """Return the bytes that stay allocated after graphs of a product were captured, replayed and freed."""
    matrix, allocated = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16), []
    product = matrix @ matrix
    for _ in range(4):
        graph = CudaRecorder()(partial(torch.mm, matrix, matrix, out=product))
        graph.replay()
        del graph
        allocated.append(torch.cuda.memory_allocated())
    return allocated


def test_recorders_leave_no_more_memory_than_the_first():
    allocated = in_a_fresh_process(bytes_after_captures)
    assert allocated[1:] == allocated[:1] * 3


def failed_capture() -> tuple[str, float]:
    """Let a step wait for the GPU while it is captured; return the error and a sum that is computed afterwards."""
    ones, message = torch.ones(8, device="cuda"), ""
    try:
        CudaRecorder()(lambda: print(float(ones.sum())))
    except RuntimeError as error:
        message = str(error)
    torch.cuda.empty_cache()
    return message, float(ones.sum())


def test_memory_can_be_freed_after_a_capture_failed():
    message, total = in_a_fresh_process(failed_capture)
    assert "captur" in message and total == 8
