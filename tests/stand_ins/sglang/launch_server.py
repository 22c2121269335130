"""`python -m sglang.launch_server` of the stand-in, whose path `/stand_in` sets faults."""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from sglang import __version__
from sglang.ranks import Ranks
from sglang.scheduler import PAUSE_MODES, Scheduler
from transformers import AutoConfig, AutoModelForCausalLM

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or "
    "finish them, then call /flush_cache."
)
NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"


class Refused(Exception):
    """The answer is status 400 with this text."""


class Server:
    """The state of the server, and one method for each path."""

    def __init__(self, args):
        self.args = args
        config = AutoConfig.from_pretrained(args.model_path)
        self.config = config
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.to(getattr(torch, args.dtype)).eval().requires_grad_(False)
        tensors = dict(model.named_parameters())
        if args.separate_head:  # as a backend that keeps a packed copy of a tied embedding
            head = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
            model.lm_head.weight = tensors["lm_head.weight"] = head
        self.ranks = Ranks(args.tp_size, {name: tensor.data for name, tensor in tensors.items()})
        self.scheduler = Scheduler(model, args.enable_deterministic_inference)
        self.session, self.skipped, self.altered = False, (), ()
        self.reported, self.called = None, []

    # --- state ---

    def server_info(self, body):
        info = {key: value for key, value in vars(self.args).items() if key not in ("separate_head", "version")}
        return info | {"version": self.args.version, "dp_size": 1, "pp_size": 1, "internal_states": [{}]}

    def model_info(self, body):
        version = self.reported or self.scheduler.version
        return {
            "model_path": self.args.model_path, "is_generation": True, "weight_version": version,
            "model_type": self.config.model_type, "architectures": self.config.architectures,
        }  # fmt: skip

    def health(self, body):
        return None

    def stand_in(self, body):
        """Set faults, and return the paths that were called."""
        for key, value in body.items():
            setattr(self.scheduler if key == "slowness" else self, key, value)
        return self.called

    # --- requests ---

    def generate(self, body):
        prompt, params = body["input_ids"], body["sampling_params"]
        if len(prompt) >= self.args.context_length:
            raise Refused(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self.args.context_length} tokens)."
            )
        try:
            req = self.scheduler.generate(body["rid"], prompt, params)
        except ValueError as error:
            raise Refused(str(error)) from error
        spans = req.spans(self.scheduler.version)
        about = {
            "id": req.rid, "finish_reason": {"type": req.reason}, "prompt_tokens": len(prompt),
            "completion_tokens": len(req.ids), "cached_tokens": 0, "weight_version": spans[-1]["version"],
            "weight_versions": spans,
        }  # fmt: skip
        if body.get("return_logprob"):
            about["output_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(req.logprobs, req.ids, strict=True)
            ]
        return {"output_ids": req.ids, "meta_info": about}

    def abort_request(self, body):
        self.scheduler.abort(body.get("rid", ""), body.get("abort_all", False))

    def pause_generation(self, body):
        assert body["mode"] in PAUSE_MODES
        self.scheduler.pause(body["mode"])
        return {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, body):
        self.scheduler.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def flush_cache(self, body):
        with self.scheduler.lock:
            if not self.scheduler.flush():
                raise Refused("Flush cache failed.")

    # --- weights ---

    def init_weights_update_group(self, body):
        keys = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        return self._weights("Succeeded", lambda: self.ranks.call("init_group", *(body[key] for key in keys)))

    def destroy_weights_update_group(self, body):
        if body["group_name"] not in self.ranks.first.groups:
            return self._failed("The group to be destroyed does not exist.")
        return self._weights("Succeeded", lambda: self.ranks.call("destroy_group", body["group_name"]))

    def begin_weight_update(self, body):
        if self.session:
            return self._failed("a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return {"success": True, "message": "Success"}

    def end_weight_update(self, body):
        if not self.session:
            return self._failed("no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return {"success": True, "message": "Success"}

    def update_weights_from_distributed(self, body):
        if not self.session:
            return self._failed(NO_SESSION)
        keys = ("names", "dtypes", "shapes", "group_name", "load_format")
        with self.scheduler.lock:
            arguments = {key: body.get(key) for key in keys}
            answer = self._weights(
                "Succeeded", lambda: self.ranks.call("update", arguments, self.skipped, self.altered)
            )
            self.scheduler.set_version(body.get("weight_version"))
            if body.get("flush_cache", True) and not self.scheduler.flush():
                return self._failed(NOT_FLUSHED)
        return answer

    def weights_checker(self, body):
        assert body["action"] == "checksum"
        return {"success": True, "message": "Success.", "ranks": self.ranks.call("checksums")}

    def _weights(self, message, action):
        try:
            action()
        except Exception as error:
            return self._failed(f"Failed: {error}")
        return {"success": True, "message": message}

    def _failed(self, message):
        raise Refused(json.dumps({"success": False, "message": message}))


POSTS = (
    "generate abort_request pause_generation continue_generation flush_cache init_weights_update_group "
    "destroy_weights_update_group begin_weight_update end_weight_update update_weights_from_distributed "
    "weights_checker stand_in"
).split()
OPEN = ("/health", "/ready", "/metrics", "/stand_in")  # the paths that need no key; the last one is not SGLang's
GETS = {"health": "health", "health_generate": "health", "server_info": "server_info", "model_info": "model_info"}


def handler_of(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def do_GET(self):
            self._answer(GETS.get(self.path.strip("/")), {})

        def do_POST(self):
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.strip("/")
            self._answer(path if path in POSTS else None, json.loads(text) if text else {})

        def _answer(self, method, body):
            status, text, key = 404, b"{}", server.args.api_key
            is_allowed = self.path.startswith(OPEN) or self.headers.get("Authorization") == f"Bearer {key}"
            if key and not is_allowed:
                status, text, method = 401, b'{"error": "Unauthorized"}', None
            else:
                server.called += [method] if method not in ("generate", "stand_in") else []
            if method is not None:
                try:
                    found = getattr(server, method)(body)
                    status, text = 200, b"" if found is None else json.dumps(found).encode()
                except Refused as refusal:
                    status, text = 400, str(refusal).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def parsed(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True, type=lambda path: str(Path(path)))
    for option in ("--load-format", "--log-level", "--host", "--api-key"):
        parser.add_argument(option)
    for option, default in (
        ("--port", 30000),
        ("--context-length", 64),
        ("--tp-size", 1),
        ("--max-running-requests", 0),
    ):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--dtype", default="float32")
    for option in ("--skip-tokenizer-init", "--disable-cuda-graph", "--enable-deterministic-inference"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--separate-head", action="store_true")  # these two are not SGLang's
    parser.add_argument("--version", default=__version__)
    return parser.parse_args(arguments)


def main():
    args = parsed()
    torch.set_num_threads(1)
    ThreadingHTTPServer.request_queue_size = 512  # of Python's five, the system would drop what many clients add
    http = ThreadingHTTPServer((args.host, args.port), handler_of(Server(args)))
    print(f"stand-in for SGLang at {http.server_address}", flush=True)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}).start()


if __name__ == "__main__":
    main()
