"""A server of chat completions whose judge misbehaves as the completion that it has to score says."""

import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.http_server import HttpServer

LATE_SECONDS = 1.5


class Judging(BaseHTTPRequestHandler):
    """Answers `fault:N word` with the fault the first N times, and then with a score, the word's length."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        request = json.loads(body)
        asked = request["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append((self.path, self.headers.get("authorization"), request))
            seen = self.server.seen[asked] = self.server.seen.get(asked, 0) + 1
        fault, number, word = re.search(r"(\w+):(\d+) (\w+)", asked).groups()
        score = f"It is fine.\n**Score:** {len(word)}"
        if seen > int(number):
            return self.say(score)
        if fault.isdigit():
            return self.answer(int(fault), b'{"error": {"message": "try later"}}')
        if fault == "late":
            time.sleep(LATE_SECONDS)
            return self.say(score)
        if fault == "hangup":
            self.close_connection = True
            return None
        if fault == "echo":
            return self.answer(401, f"bad key {self.headers.get('authorization')}".encode())
        return {
            "html": lambda: self.answer(200, b"<html>busy</html>"),
            "binary": lambda: self.answer(200, b'{"choices": \xff\xfe'),
            "shape": lambda: self.answer(200, b'{"choices": []}'),
            "prose": lambda: self.say("I would rather not say."),
            "thinking": lambda: self.say(None),
            "beyond": lambda: self.say("Score: 11"),
        }[fault]()

    def say(self, text):
        self.answer(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if status == 429:
            self.send_header("retry-after", "0.05")
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # a client that has given up
            self.close_connection = True

    def log_message(self, *arguments):
        pass


@contextmanager
def judging():
    """Run the server; yield it with its `url`, the `requests` that it got, and how often it has `seen` each."""
    server = HttpServer(("127.0.0.1", 0), Judging)
    server.lock, server.requests, server.seen = threading.Lock(), [], {}
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
