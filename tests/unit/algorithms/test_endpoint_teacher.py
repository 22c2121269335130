"""A teacher behind a real HTTP server, whose logprobs are known."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
import torch

from rl_megatron.algorithms.endpoint_teacher import EndpointTeacher, TeacherFailed
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.teachers import TeacherConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from rl_megatron.topology.ranks import Ranks
from tests.http_server import HttpServer

VOCAB = 12
# Row i has the logprobs of the token after token i.
TABLE = (2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))).log_softmax(-1)
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
LENGTHS = torch.tensor([5, 3])


class Letters:
    """A tokenizer with a token for each character."""

    vocab_size = VOCAB

    def encode(self, text):
        return [ord(letter) % VOCAB for letter in text]


class Answering(BaseHTTPRequestHandler):
    """Answers as vLLM does, with the faults that the test has put into `faults`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        faults = self.server.faults
        if faults.get("busy", 0) > 0:
            faults["busy"] -= 1
            return self.answer(503, {"error": "busy"})
        if self.path == "/tokenize":
            ids = Letters().encode(body["prompt"])
            tokens = ids[::-1] if "tokenizer" in faults else ids
            return self.answer(200, {"tokens": tokens, "max_model_len": faults.get("max_model_len", 64)})
        assert self.path == "/v1/completions" and body["model"] == "big"
        most = faults.get("max_logprobs", VOCAB)
        if body["prompt_logprobs"] > most:
            return self.answer(400, {"error": f"Requested prompt logprobs, which is greater than max allowed: {most}"})
        choice = {"text": "x"}
        if "no logprobs" not in faults:
            choice["prompt_logprobs"] = [None, *map(self.entry, body["prompt"], body["prompt"][1:], [body] * 99)]
        return self.answer(200, {"choices": [choice]})

    def entry(self, before, token, body):
        """Return the largest logprobs after `before`, and that of the token itself, as vLLM does."""
        ids = TABLE[before].topk(body["prompt_logprobs"]).indices.tolist()
        given = [token, *ids[: self.server.faults.get("gives", VOCAB)]]
        if "no own" in self.server.faults:
            given = [each for each in range(VOCAB) if each != token]
        return {str(each): {"logprob": TABLE[before, each].item()} for each in given}

    def answer(self, status, content):
        self.send_response(status)
        data = json.dumps(content).encode()
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@contextmanager
def served(**faults):
    """Run the server; yield a teacher behind it, with two further attempts for each request."""
    server = HttpServer(("127.0.0.1", 0), Answering)
    server.faults = faults
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        teacher = EndpointTeacher(TeacherConfig(url=url, model="big", retries=2), Ranks.detect())
        yield teacher, server.faults
        teacher.close()
    finally:
        server.shutdown()
        server.server_close()


def batch():
    return BatchedDataDict(input_ids=IDS, input_lengths=LENGTHS)


def test_the_largest_logprobs_of_every_token_are_read():
    with served(busy=2) as (teacher, _):
        teacher.check(Letters(), top_k=4, longest=5)
        logprobs, ids = teacher.topk_logits(Batch.from_whole(batch()), 4, Batching())
    want = TABLE[IDS].topk(4)
    for sequence, length in enumerate(LENGTHS.tolist()):
        read = slice(0, length - 1)  # nothing follows the last token
        torch.testing.assert_close(logprobs[sequence, read], want.values[sequence, read])
        assert torch.equal(ids[sequence, read], want.indices[sequence, read])
        assert not logprobs[sequence, length - 1 :].any()


def test_the_logprob_of_every_token_is_read_though_it_is_not_the_likeliest():
    with served() as (teacher, _):
        logprobs = teacher.logprobs(Batch.from_whole(batch()), Batching())
    want = torch.zeros(2, 5)
    want[0, 1:] = TABLE[IDS[0, :-1], IDS[0, 1:]]
    want[1, 1:3] = TABLE[IDS[1, :2], IDS[1, 1:3]]
    torch.testing.assert_close(logprobs, want)


def test_the_whole_vocabulary_as_the_top_k_gives_the_kl_of_both_distributions():
    student = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(5) < LENGTHS[:, None]).float()
    data = batch() | {"token_mask": mask, "sample_mask": torch.ones(2), "temperature": 0.7}
    with served() as (teacher, _):
        data["teacher_topk_logits"], data["teacher_topk_indices"] = teacher.topk_logits(
            Batch.from_whole(batch()), VOCAB, Batching()
        )
    loss, _ = build_loss("distillation", {"kl_type": "forward"})(student, data, 2, mask[:, 1:].sum())
    log_p, log_q = (TABLE[IDS] / 0.7).log_softmax(-1), (student / 0.7).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[:, :-1]
    torch.testing.assert_close(loss, (kl * mask[:, 1:]).sum() / mask[:, 1:].sum())


@pytest.mark.change
@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"no logprobs": True}, "has no prompt_logprobs.*/tokenize, and completions with at least 4 prompt_logprobs"),
        ({"max_logprobs": 3}, r"max allowed: 3.*--max-logprobs.*lower algorithm.top_k"),
        ({"gives": 2}, r"has \d prompt_logprobs of token \d+, but needs 4"),
        ({"no own": True}, "with that of the token"),
        ({"tokenizer": True}, "another tokenizer than the student"),
        ({"max_model_len": 5}, "reads at most 4 tokens, but the data has sequences of up to 5"),
        ({"busy": 99}, "answered with status 503"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_does_not_fit_is_refused(faults, message, monkeypatch):
    monkeypatch.setattr("rl_megatron.rewards.endpoint.random.uniform", lambda low, high: 0.0)  # no waiting
    with served(**faults) as (teacher, _), pytest.raises(ConfigError, match=message):
        teacher.check(Letters(), top_k=4, longest=5)


def test_a_server_that_stops_answering_is_named(monkeypatch):
    monkeypatch.setattr("rl_megatron.rewards.endpoint.random.uniform", lambda low, high: 0.0)
    with served() as (teacher, faults):
        faults["busy"] = 99
        with pytest.raises(TeacherFailed, match=r"127\.0\.0\.1.* answered with status 503"):
            teacher.logprobs(Batch.from_whole(batch()), Batching())
