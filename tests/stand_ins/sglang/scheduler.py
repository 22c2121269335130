"""The requests of the stand-in: one thread adds a token to each running request, until it is paused."""

import threading
import time
from dataclasses import dataclass, field

import torch

PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass
class Req:
    """A request with the tokens that it has so far, and the versions of the weights before each change."""

    rid: str
    prompt: list
    params: dict
    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    changes: list = field(default_factory=list)  # (old version, number of tokens at the change)
    reason: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, reason):
        self.reason = reason
        self.ended.set()

    def spans(self, version):
        spans, start = [], 0
        for each, end in [*self.changes, (version, len(self.ids))]:
            if end > start and spans and spans[-1]["version"] == each:
                spans[-1]["end"] = start = end
            elif end > start:
                spans.append({"version": each, "start": start, "end": end})
                start = end
        return spans or [{"version": version, "start": 0, "end": 0}]


class Scheduler:
    """The requests, the weights' version, and the cache of what was computed with them."""

    def __init__(self, model, deterministic):
        self.model, self.deterministic = model, deterministic
        self.lock = threading.Condition()
        self.running, self.waiting = [], []
        self.paused, self.version = False, "default"
        self.cache = {}  # logits by tokens, as SGLang's prefix cache keeps keys and values
        self.slowness = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    # --- requests ---

    def generate(self, rid, prompt, params):
        """Return a request once it has ended. While generation is paused, new ones wait."""
        with self.lock:
            self.lock.wait_for(lambda: not self.paused)
            if any(req.rid == rid for req in self.running + self.waiting):
                raise ValueError(f"Duplicate request ID detected: {rid}")
            req = Req(rid, prompt, params)
            self.waiting.append(req)
            self.lock.notify_all()
        req.ended.wait()
        return req

    def pause(self, mode):
        with self.lock:
            self.paused = True
            if mode == "abort":
                self._abort(lambda req: True)
            elif mode == "retract":
                self.waiting, self.running = self.running + self.waiting, []

    def resume(self):
        with self.lock:
            self.paused = False
            self.lock.notify_all()

    def abort(self, rid, abort_all):
        with self.lock:
            if abort_all or any(req.rid == rid for req in self.running + self.waiting):
                self._abort(lambda req: abort_all or req.rid.startswith(rid))

    def _abort(self, chosen):
        for req in [req for req in self.running + self.waiting if chosen(req)]:
            for requests in (self.running, self.waiting):
                if req in requests:
                    requests.remove(req)
            req.end("abort")

    # --- weights ---

    def set_version(self, version):
        if version is None or version == self.version:
            return
        for req in self.running + self.waiting:
            if req.ids:
                req.changes.append((self.version, len(req.ids)))
        self.version = version

    def flush(self):
        """Drop what older weights have computed, unless requests run, or wait while nothing is paused."""
        if self.running or (self.waiting and not self.paused):
            return False
        self.cache.clear()
        return True

    # --- tokens ---

    def _run(self):
        while True:
            with self.lock:
                self.lock.wait_for(lambda: not self.paused and (self.running or self.waiting))
                self.running, self.waiting = self.running + self.waiting, []
                for req in list(self.running):
                    self._add_token(req)
                    if req.reason is not None:
                        self.running.remove(req)
                        req.ended.set()
            time.sleep(self.slowness)

    @torch.no_grad()
    def _add_token(self, req):
        tokens = tuple(req.prompt + req.ids)
        if tokens not in self.cache:
            self.cache[tokens] = self.model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
        temperature = req.params.get("temperature", 1.0)
        logprobs = torch.log_softmax(self.cache[tokens] / (temperature or 1.0), dim=-1)
        token = int(logprobs.argmax()) if temperature == 0 else self._sampled(req, logprobs)
        req.ids.append(token)
        req.logprobs.append(float(logprobs[token]))
        if token in (req.params.get("stop_token_ids") or ()):
            req.reason = "stop"
        elif len(req.ids) >= req.params["max_new_tokens"]:
            req.reason = "length"

    def _sampled(self, req, logprobs):
        top_k, top_p = req.params.get("top_k", -1), req.params.get("top_p", 1.0)
        probs, order = logprobs.exp().sort(descending=True)
        outside = probs.cumsum(0) - probs > top_p
        outside[top_k if top_k > 0 else len(probs) :] = True
        seed = req.params.get("sampling_seed", 42) if self.deterministic else torch.seed()
        generator = torch.Generator().manual_seed((seed * 1_000_003 + len(req.ids)) % 2**63)
        return int(order[torch.multinomial(probs.masked_fill(outside, 0.0), 1, generator=generator)])
