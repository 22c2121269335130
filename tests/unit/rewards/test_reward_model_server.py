"""The reward function `reward_model` behind a server, and running statistics."""

import asyncio
import json
import statistics
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.functions import RewardModelServer
from rl_megatron.rewards.reward_function import RewardFunction
from rl_megatron.rewards.reward_models import RunningStatistics
from rl_megatron.rewards.samples import Sample
from tests.http_server import HttpServer

# Path → what the server makes of a request: the number of characters of the text, in the form of vLLM's endpoint.
REPLIES = {
    "/pooling": lambda body: {"data": [{"data": [[0.5], [len(body["input"])]]}]},
    "/classify": lambda body: {"data": [{"probs": [len(body["input"])]}]},
    "/score": lambda body: {"data": [{"score": len(body["text_1"]) + len(body["text_2"])}]},
    "/nan": lambda body: {"data": [{"data": [float("nan")]}]},
}


class Scoring(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = json.dumps(REPLIES[self.path.partition("?")[0]](body) if body["model"] == "m" else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    running = HttpServer(("127.0.0.1", 0), Scoring)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def scored(url, **kwargs):
    sample = Sample(Problem("abc", "", {}), "de", [4], False, sequence_ids=[1, 2, 3, 4], sequence_text="abc:de")
    function = RewardFunction(RewardModelServer, "reward_model", {"url": url, "model": "m", "retries": 0} | kwargs)
    return asyncio.run(function.call(sample))


@pytest.mark.parametrize(
    ("protocol", "kwargs", "length"),
    [
        ("pooling", {}, 6),
        ("classify", {}, 6),
        ("pooling", {"sends": "tokens"}, 4),
        ("classify", {"sends": "completion"}, 5),
        ("score", {}, 5),
    ],
)
def test_the_protocol_says_what_is_sent_and_where_the_score_is(server, protocol, kwargs, length):
    found = scored(f"{server}/{protocol}", protocol=protocol, **kwargs)
    assert found == {"score": length, "raw": length, "attempts": 1.0}


@pytest.mark.parametrize("sends", ["string", "tokens"])
def test_a_sample_without_the_tokens_of_its_sequence_is_refused(sends):
    function = RewardModelServer("http://127.0.0.1:1", "m", sends=sends)
    with pytest.raises(ValueError, match=f"sends={sends} needs the tokens of the whole sequence"):
        asyncio.run(function("abc", "de"))


def test_the_score_is_shifted_scaled_and_clipped(server):
    assert scored(f"{server}/pooling", mean=1.0, std=2.0)["score"] == 2.5
    assert scored(f"{server}/pooling", mean=1.0, std=2.0, clip=1.5) == {"score": 1.5, "raw": 6.0, "attempts": 1.0}


@pytest.mark.parametrize(("path", "kwargs"), [("classify", {}), ("pooling", {"model": "n"}), ("nan", {})])
def test_a_reply_without_a_score_names_the_protocol(server, path, kwargs):
    with pytest.raises(RuntimeError, match="has no score where the protocol says"):
        scored(f"{server}/{path}", **kwargs)


@pytest.mark.parametrize("of_server", [True, False])
def test_messages_leave_out_the_query_of_the_address_which_may_hold_a_key(server, of_server):
    address = f"{server}/nan" if of_server else "http://127.0.0.1:1/pooling"
    with pytest.raises(RuntimeError) as raised:
        scored(f"{address}?sig=hidden")
    assert address in str(raised.value) and "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"protocol": "rank"}, "protocol"),
        ({"sends": "words"}, "sends='words' must be one of string, tokens, completion"),
        ({"sends": "tokens", "protocol": "score"}, "sends=tokens needs protocol=pooling or classify"),
        ({"std": 0}, "std"),
        ({"clip": 0}, "clip"),
    ],
)
def test_a_wrong_argument_is_named(kwargs, words):
    with pytest.raises(ValueError, match=words):
        RewardModelServer("http://127.0.0.1:1", "m", **kwargs)


def test_running_statistics_equal_those_of_all_numbers_and_go_on_after_a_restart():
    values = [1e6 + 0.1 * number**2 for number in range(50)]
    whole, first = RunningStatistics(), RunningStatistics()
    whole.add(values)
    for start in range(0, 30, 7):
        first.add(values[start : min(start + 7, 30)])
    second = RunningStatistics()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.add(values[30:])
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    for each in (whole, second):
        assert each.normalize(values[3]) == pytest.approx((values[3] - mean) / std, rel=1e-9)
    assert RunningStatistics().normalize(3.0) == 3.0
