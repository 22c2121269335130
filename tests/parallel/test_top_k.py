"""The k largest logits of each token: vocabulary shards equal whole logits, and so does a policy in every layout."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.batching.config import Batching
from rl_megatron.logprobs import vocab_parallel_top_k
from rl_megatron.losses import DistillationLossFn
from rl_megatron.topology.collectives import ALL_GATHER
from tests.parallel.layouts import VOCAB_SIZE, build_policy
from tests.parallel.test_layouts import random_batch


def tied_logits(vocab, dtype):
    logits = torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(0)).mul(3).round().to(dtype)
    logits[0, 0], logits[0, 1] = 0.0, -torch.inf
    return logits


def sharded(vocab, k, dtype, valid):
    logits = tied_logits(vocab, dtype).chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]
    with mock.patch.object(dist, ALL_GATHER, side_effect=getattr(dist, ALL_GATHER)) as gather:
        values, ids = vocab_parallel_top_k(logits, k, dist.group.WORLD, valid_vocab_size=valid)
    return values, ids, gather.call_count, [call.args[1].nbytes for call in gather.call_args_list]


@pytest.mark.parametrize(
    ("size", "vocab", "k", "dtype", "valid"),
    [
        (1, 40, 6, torch.float32, None),
        (2, 40, 6, torch.float32, None),
        (4, 40, 6, torch.bfloat16, None),
        (4, 40, 25, torch.float32, 29),  # k is more than a shard's width; the last rank holds only padding
        (4, 8, 8, torch.float16, None),
    ],
)
def test_shards_give_the_bits_of_the_whole(ranks, size, vocab, k, dtype, valid):
    want_values, want_ids = vocab_parallel_top_k(tied_logits(vocab, dtype), k, valid_vocab_size=valid)
    for values, ids, calls, sent in ranks.run(size, sharded, vocab, k, dtype, valid):
        assert torch.equal(values, want_values) and torch.equal(ids, want_ids)
        assert calls == (size > 1) and all(number == 21 * 8 * min(k, vocab // size) for number in sent)


def topk_logits(parallel, batching, k):
    policy = build_policy(parallel, batching=batching)
    batch = random_batch(7, 16, 0)  # 7 is odd, so that data parallelism needs a padding sequence
    return policy.get_topk_logits(batch, k), batch


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, topk_logits, {}, Batching("padded", 7), 5)[0][0]


def test_entry_t_has_the_logits_of_the_next_token_and_padding_is_zero(ranks):
    """The logits of all tokens give the policy's logprobs after division by each sequence's temperature."""
    (found, batch), logprobs = ranks.run(1, every_logit)[0]
    logits = torch.empty(7, 16, VOCAB_SIZE).scatter_(2, found["topk_indices"], found["topk_logits"])
    lengths = batch["input_lengths"]
    inside = torch.arange(16) < lengths[:, None]
    assert (found["topk_logits"][~inside] == 0).all() and (found["topk_indices"][~inside] == 0).all()
    assert (found["topk_logits"].diff(dim=-1) <= 0).all() and found["topk_logits"][inside].abs().sum() > 0
    scaled = (logits / batch["temperature"][:, None, None])[:, :-1].log_softmax(-1)
    want = scaled.gather(2, batch["input_ids"][:, 1:, None])[..., 0].masked_fill(~inside[:, 1:], 0.0)
    torch.testing.assert_close(logprobs[:, 1:], want, rtol=0, atol=1e-5)


def every_logit():
    policy = build_policy({}, batching=Batching("padded", 3))
    batch = random_batch(7, 16, 0)
    return (policy.get_topk_logits(batch, VOCAB_SIZE), batch), policy.get_logprobs(batch)["logprobs"]


@pytest.mark.parametrize(
    ("size", "parallel", "kind"),
    [
        (1, {}, "packed"),
        (2, {"tensor": 2, "sequence": True}, "padded"),
        (2, {"context": 2}, "packed"),
        (2, {"context": 2}, "padded"),
        (4, {"tensor": 2, "pipeline": 2}, "dynamic"),
        (4, {"pipeline": 2, "virtual_pipeline": 2}, "packed"),  # with two data-parallel ranks
        (8, {"tensor": 2, "pipeline": 2, "context": 2}, "packed"),
    ],
)
def test_every_layout_and_kind_of_batching_equals_one_process(ranks, one_process, size, parallel, kind):
    for found, _ in ranks.run(size, topk_logits, parallel, Batching(kind, sequences=2, tokens=32), 5):
        assert found["topk_logits"].dtype == torch.float32 and found["topk_indices"].dtype == torch.int64
        torch.testing.assert_close(found["topk_logits"], one_process["topk_logits"], rtol=1e-5, atol=1e-5)
        assert torch.equal(found["topk_indices"], one_process["topk_indices"])


def refusals():
    messages = []
    for k in (0, VOCAB_SIZE + 1):
        with pytest.raises(ValueError) as error:
            build_policy({"pipeline": 2}).get_topk_logits(random_batch(4, 8, 0), k)
        messages.append(str(error.value))
    return messages


def test_a_k_that_the_vocabulary_does_not_have_is_refused_on_every_rank(ranks):
    for messages in ranks.run(2, refusals):
        assert [message.split()[0] for message in messages] == ["k=0", f"k={VOCAB_SIZE + 1}"]


def distil(parallel, k, steps):
    teacher, student = build_policy({}, seed=5), build_policy(parallel, seed=1)
    batch = random_batch(8, 16, 0)
    top = teacher.get_topk_logits(batch, k)
    batch["teacher_topk_logits"], batch["teacher_topk_indices"] = top["topk_logits"], top["topk_indices"]
    return [student.train(batch, DistillationLossFn({"kl_type": "mixed"}), gbs=8)["loss"] for _ in range(steps)]


def test_a_student_learns_from_its_teachers_top_k(ranks):
    alone = ranks.run(1, distil, {}, 8, 12)[0]
    assert alone[-1] < 0.5 * alone[0]
    assert ranks.run(2, distil, {"tensor": 2}, 8, 12)[0] == pytest.approx(alone, rel=1e-3)
