"""Buckets as SGLang reads them, and what its checksums say about a weight sync."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import Bucket, RefitPlan, TensorSpec, WeightsRefused
from rl_megatron.weight_sync.servers import ServerRefused, WeightServers
from rl_megatron.weight_sync.sglang import ChecksumHistory, SglangSync, find_sources, flatten, order_flat

Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
QKV, NORM, EMBEDDING = "model.layers.0.self_attn.qkv_proj.weight", "model.norm.weight", "model.embed_tokens.weight"


def filled(*specs):
    """Return a bucket and a buffer with its tensors, and the tensors by name."""
    bucket = Bucket(tuple(TensorSpec(*spec) for spec in specs))
    buffer = torch.zeros(bucket.num_words, dtype=torch.int64)
    tensors = {}
    for index, spec in enumerate(bucket.tensors):
        tensors[spec.name] = bucket.tensor(buffer, index)
        tensors[spec.name].copy_(torch.arange(1, tensors[spec.name].numel() + 1).view(spec.shape))
    return bucket, buffer, tensors


@pytest.mark.parametrize(
    "specs",
    [
        [("a", (2, 4), "float32"), ("b", (4,), "bfloat16")],
        [("a", (3,), "bfloat16"), ("b", (3, 1), "float32"), ("c", (5,), "bfloat16")],
    ],
)
def test_the_tensors_of_a_flat_bucket_follow_each_other_without_gaps(specs):
    bucket, buffer, tensors = filled(*specs)
    flat, start = flatten(bucket, buffer), 0
    for spec in order_flat(bucket):
        assert start % spec.torch_dtype.itemsize == 0  # SGLang refuses a tensor that begins elsewhere
        part = flat[start : start + spec.num_bytes].view(spec.torch_dtype).view(spec.shape)
        assert torch.equal(part, tensors[spec.name])
        start += spec.num_bytes
    assert flat.dtype == torch.uint8 and flat.numel() == start


def test_a_bucket_without_padding_is_sent_without_a_copy():
    bucket, buffer, _ = filled(("a", (2, 4), "float32"), ("b", (4,), "bfloat16"))
    assert flatten(bucket, buffer).data_ptr() == buffer.data_ptr()


def test_fused_and_tied_tensors_have_the_tensors_of_the_checkpoint_as_sources():
    assert find_sources(QKV, [Q, K, V, NORM]) == [Q, K, V]
    assert find_sources(NORM, [Q, NORM]) == [NORM]
    assert find_sources("lm_head.weight", [EMBEDDING]) == [EMBEDDING]
    assert find_sources("lm_head.weight", [EMBEDDING, "lm_head.weight"]) == ["lm_head.weight"]
    assert find_sources("rotary.cos", [Q, K, V]) == []


def answer(*ranks):
    return {"success": True, "ranks": [{"checksums": checksums} for checksums in ranks]}


SENT = {Q: 1, K: 2, V: 3, NORM: 4, EMBEDDING: 5}
FIRST = {QKV: "a", NORM: "b", EMBEDDING: "c"}


def test_what_changed_on_a_server_must_be_what_changed_in_the_policy():
    history = ChecksumHistory(same_dtype=True)
    history.check([answer(FIRST)], SENT)
    history.check([answer(FIRST)], SENT)
    history.check([answer({**FIRST, QKV: "A"})], {**SENT, K: 9})
    with pytest.raises(WeightsRefused, match=rf"server 0: {NORM} did not change, although {NORM} was sent"):
        history.check([answer({**FIRST, QKV: "A"})], {**SENT, K: 9, NORM: 0})
    with pytest.raises(WeightsRefused, match=f"server 0: {EMBEDDING} changed, although no change of"):
        history.check([answer({**FIRST, QKV: "A", EMBEDDING: "C"})], {**SENT, K: 9, NORM: 0})


def test_a_change_on_any_rank_of_a_server_counts():
    history = ChecksumHistory(same_dtype=True)
    history.check([answer(FIRST, FIRST)], SENT)
    history.check([answer(FIRST, {**FIRST, QKV: "A"})], {**SENT, V: 9})


def test_a_head_that_did_not_follow_the_embedding_is_refused():
    history = ChecksumHistory(same_dtype=True)
    history.check([answer({**FIRST, "lm_head.weight": "c"})], SENT)
    with pytest.raises(WeightsRefused, match=f"lm_head.weight did not change, although {EMBEDDING} was sent"):
        history.check([answer({**FIRST, EMBEDDING: "C", "lm_head.weight": "c"})], {**SENT, EMBEDDING: 9})


def test_servers_with_different_weights_are_refused_even_if_dtypes_differ():
    history = ChecksumHistory(same_dtype=False)
    history.check([answer(FIRST), answer(FIRST)], SENT)
    history.check([answer(FIRST), answer(FIRST)], {**SENT, NORM: 9})  # perhaps too small a change for the dtype
    with pytest.raises(WeightsRefused, match=f"server 1 has other weights than server 0 in {NORM}"):
        history.check([answer(FIRST), answer({**FIRST, NORM: "B"})], SENT)


class Server:
    """Stands in for an SGLang server of a Llama model, and keeps which paths it is asked for."""

    name = "SGLang server 0"

    def __init__(self, architecture="LlamaForCausalLM", is_open=False):
        self.asked, self._is_open = [], is_open
        self._answer = {"tp_size": 1, "dtype": "bfloat16", "architectures": [architecture], "weight_version": "7"}

    def request(self, method, path, body=None, timeout_seconds=None):
        self.asked.append(path)
        future = Future()
        if path == "/begin_weight_update" and self._is_open:
            future.set_exception(ServerRefused("400: a weight update is already open"))
        else:
            future.set_result(self._answer | answer(FIRST))
        self._is_open = self._is_open and path != "/end_weight_update"
        return future


def sync_with(server):
    cpu = torch.device("cpu")
    servers = WeightServers([server], Ranks(), timeout_seconds=5, seconds_after_a_break=0.1)
    plan = RefitPlan({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}, 10, ())
    exporter = SimpleNamespace(plan=plan, gather_buckets=lambda: [])
    weights = SimpleNamespace(plan=plan, get_exporter=lambda: exporter)
    return SglangSync(servers, weights, SimpleNamespace(is_cuda=False, device=cpu), timeout_seconds=1.0)


def test_a_server_of_another_model_is_refused_before_it_is_asked_to_join():
    server = Server("GemmaForCausalLM")
    with pytest.raises(ServerRefused, match="server 0 serves GemmaForCausalLM, but the policy is LlamaForCausalLM"):
        sync_with(server).connect()
    assert server.asked == ["/server_info", "/model_info"]


@pytest.mark.parametrize("is_open", [False, True])
def test_an_update_that_a_failed_sync_left_open_is_closed_first(is_open):
    server = Server(is_open=is_open)
    sync_with(server).send(7)
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert server.asked == [*([begin, end] * is_open), begin, end, "/model_info", "/weights_checker"]
