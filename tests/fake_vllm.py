"""A small server that answers as vLLM 0.32 does, or wrongly in one of the ways that clients have to notice.

It counts up from the prompt's last token: after 5 come 6, 7, 8. Every logprob is -0.5.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlparse

from tests.http_server import HttpServer

VOCAB_SIZE = 50
SETTINGS = {
    "model_config": {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_model_len": 64},
    "scheduler_config": {"enable_chunked_prefill": True, "max_num_batched_tokens": 512},
    "device_config": {"device": "cpu"},
}


class FakeVllm:
    """The server, in threads of this process.

    Attributes:
        wrong: A function that changes an answer to /inference/v1/generate, or acts on the handler and returns None.
        wrong_times: How many answers it is applied to.
        asked: The bodies of all requests for completions.
        called: The paths of all other POST requests.
        awaited: It answers no request until this many were in flight at the same time, or five seconds have passed.
        most_in_flight: The most requests for completions that were in flight at the same time.
    """

    def __init__(self, port=0, token=""):
        self.version, self.weights, self.settings, self.healthy = "0.32.0", "1", json.loads(json.dumps(SETTINGS)), True
        self.wrong, self.wrong_times, self.seconds, self.health_status = None, 1 << 30, 0.0, 200
        self.asked, self.called = [], []
        self.in_flight = self.tokens_in_flight = self.most_in_flight = self.most_tokens = 0
        self.awaited, self.arrived = 0, threading.Condition()
        self.lock, self.going = threading.Lock(), threading.Event()
        self.going.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                if token and self.path != "/health" and self.headers.get("Authorization") != f"Bearer {token}":
                    return fake.answer(self, {}, 401)
                return fake.get(self)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.post(self, json.loads(body) if body else {})

        self.server = HttpServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler, body, status=200):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def get(self, handler):
        path = urlparse(handler.path).path
        bodies = {
            "/health": {},
            "/version": {"version": self.version},
            "/server_info": {"vllm_config": self.settings},
            "/weight_info": {"weight_version": self.weights},
        }
        status = 200 if path in bodies else 404
        if path == "/health":
            status = self.health_status if self.healthy else 503
        self.answer(handler, bodies.get(path, {}), status)

    def post(self, handler, body):
        path = urlparse(handler.path).path
        if path == "/inference/v1/generate":
            self.generate(handler, body)
            return
        self.called.append(handler.path)
        if path == "/pause":
            self.going.clear()
        elif path == "/resume":
            self.going.set()
        elif path == "/finish_weight_update":
            self.weights = body["weight_version"]
        self.answer(handler, {"status": "done"})

    def generate(self, handler, body):
        tokens = len(body["token_ids"]) + body["sampling_params"]["max_tokens"]
        with self.lock:
            self.asked.append(body)
            self.in_flight += 1
            self.tokens_in_flight += tokens
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.most_tokens = max(self.most_tokens, self.tokens_in_flight)
            wrong = self.wrong if self.wrong_times > 0 else None
            self.wrong_times -= wrong is not None
        try:
            with self.arrived:
                self.arrived.notify_all()
                self.arrived.wait_for(lambda: self.most_in_flight >= self.awaited, timeout=5.0)
            time.sleep(self.seconds)
            answer = self.completion(body)
            if wrong is not None:
                answer = wrong(answer, handler, body)
            if answer is not None:
                self.answer(handler, answer)
        finally:
            with self.lock:
                self.in_flight -= 1
                self.tokens_in_flight -= tokens

    def completion(self, body):
        parameters, ids, reason = body["sampling_params"], [], "length"
        for token in range(body["token_ids"][-1] + 1, body["token_ids"][-1] + 1 + parameters["max_tokens"]):
            self.going.wait()
            ids.append(token % VOCAB_SIZE)
            if ids[-1] in parameters["stop_token_ids"]:
                reason = "stop"
                break
        content = [{"token_id": token, "logprob": -0.5} for token in ids]
        spans = [{"version": self.weights, "start": 0, "end": len(ids)}] if ids else []
        choice = {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans, "finish_reason": reason}
        return {"request_id": body["request_id"], "choices": [choice]}


def changed(**parts):
    """Return a fault that changes parts of the answer's choice; a value that is a function gets the old value."""

    def wrong(answer, handler, body):
        choice = answer["choices"][0]
        for key, value in parts.items():
            choice[key] = value(choice[key]) if callable(value) else value
        return answer

    return wrong


def logprob(value):
    """Return a fault that gives the last token another logprob."""
    return changed(logprobs=lambda old: {"content": [*old["content"][:-1], old["content"][-1] | {"logprob": value}]})


def status(code, message="EngineCore encountered an issue."):
    """Return a fault that answers with an error, as vLLM writes it."""

    def wrong(answer, handler, body):
        error = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}}
        text = json.dumps(error).encode()
        handler.send_response(code)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    return wrong


def closes_in_mid_answer(answer, handler, body):
    """Send half of an answer, and close the connection."""
    text = json.dumps(answer).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text[: len(text) // 2])
    handler.close_connection = True


def is_not_json(answer, handler, body):
    """Answer with a page of a proxy."""
    return b"<html>Bad gateway</html>"
