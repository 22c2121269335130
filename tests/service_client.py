"""A small client of the training service, which keeps trying while the server is away, as the SDK does."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rl_megatron.service.datums import Datum
from rl_megatron.service.protobuf import FLOAT32, INT64, new_message

SECONDS_TO_TRY = 120.0


class RequestFailed(AssertionError):
    """The error of a request that the server answered with one."""


class Client:
    """A client with a session of its own, whose requests wait for their results."""

    def __init__(self, url: str, key: str):
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60.0)
        self.session = self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})[
            "session_id"
        ]
        self._counts: dict[str, int] = {}

    def post(self, path: str, content: Mapping[str, Any] | bytes) -> Any:
        """Send a request until it is answered, and return the answer: JSON or the bytes of a message."""
        options: dict[str, Any] = {"content": content} if isinstance(content, bytes) else {"json": content}
        until = time.monotonic() + SECONDS_TO_TRY
        while True:
            try:
                answer = self._http.post(f"/api/v1/{path}", **options)
            except httpx.TransportError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
                continue
            if answer.status_code == 408:
                continue
            if answer.status_code >= 400:
                raise RequestFailed(f"{answer.status_code}: {answer.text}")
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.json() if is_json else answer.content

    def wait(self, future: Mapping[str, Any]) -> Any:
        """Return the result of a future."""
        result = self.post("retrieve_future", {"request_id": future["request_id"]})
        if isinstance(result, dict) and "error" in result:
            raise RequestFailed(result["error"])
        return result

    def next_seq(self, name: str) -> int:
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name]

    def create(self, base: str, rank: int, seed: int, number: int = 0, **flags: bool) -> str:
        """Make a training run, and return its name."""
        body = {
            "session_id": self.session, "model_seq_id": number, "base_model": base,
            "lora_config": {"rank": rank, "seed": seed, **flags},
        }  # fmt: skip
        return self.wait(self.post("create_model", body))["model_id"]

    def send_loss(
        self, run: str, data: list[Datum], loss: str, forward_only: bool = False, seq: int | None = None,
        **options: float,
    ) -> Any:  # fmt: skip
        """Send datums for a loss, by default with the run's next number, and return the future."""
        message = new_message("ForwardBackwardRequest")
        message.model_id, message.seq_id, message.loss_fn = run, self.next_seq(run) if seq is None else seq, loss
        message.forward_only = forward_only
        for name, value in options.items():
            message.loss_fn_config_v2[name].number = value
        for datum in data:
            sent = message.data.add()
            sent.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
            for name, values in datum.inputs.items():
                tensor = sent.loss_fn_inputs[name]
                is_int = values.dtype.kind == "i"
                tensor.dtype = INT64 if is_int else FLOAT32
                tensor.shape.extend(values.shape)
                tensor.dense = values.astype("<i8" if is_int else "<f4").tobytes()
        return self.post("forward_backward", message.SerializeToString())

    def loss(self, run: str, data: list[Datum], loss: str, **options: Any) -> bytes:
        """Return the result of a loss, as the bytes of its message."""
        return self.wait(self.send_loss(run, data, loss, **options))

    def step(self, run: str, **params: float) -> dict[str, Any]:
        """Take an optimizer step."""
        return self.wait(
            self.post("optim_step", {"model_id": run, "seq_id": self.next_seq(run), "adam_params": params})
        )

    def save(self, run: str, name: str, **options: Any) -> str:
        """Save the state of a run, and return its path."""
        body = {"model_id": run, "seq_id": self.next_seq(run), "path": name, **options}
        return self.wait(self.post("save_weights", body))["path"]

    def load(self, run: str, path: str, optimizer: bool) -> None:
        body = {"model_id": run, "seq_id": self.next_seq(run), "path": path, "optimizer": optimizer}
        self.wait(self.post("load_weights", body))

    def sampler(self, run: str, number: int) -> str:
        """Save the weights of a run for sampling, and return the sampler."""
        body = {"model_id": run, "seq_id": self.next_seq(run), "sampling_session_seq_id": number}
        return self.wait(self.post("save_weights_for_sampler", body))["sampling_session_id"]

    def sample(self, sampler: str, prompt: list[int], **options: Any) -> Any:
        """Return the samples of a prompt: a message of the kind SampleResponse."""
        params = {name: options.pop(name) for name in ("max_tokens", "seed", "temperature", "stop") if name in options}
        body = {
            "sampling_session_id": sampler, "seq_id": self.next_seq(sampler), "sampling_params": params,
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]}, **options,
        }  # fmt: skip
        return read("SampleResponse", self.wait(self.post("asample", body)))


def read(kind: str, content: bytes) -> Any:
    """Return a message."""
    message = new_message(kind)
    message.ParseFromString(content)
    return message


def read_logprobs(content: bytes) -> list[np.ndarray]:
    """Return the logprobs of each datum in the result of a loss, one after the other."""
    found = []
    for record in read("ForwardBackwardOutput", content).loss_fn_outputs:
        field = record.fields["logprobs"]
        values, offsets = np.frombuffer(field.data, "<f4"), np.frombuffer(field.offsets, "<i8") // 4
        found += [values[start:stop] for start, stop in zip(offsets, offsets[1:], strict=False)]
    return found


def read_key(directory: Path) -> str:
    """Return the key that a server has made in its directory."""
    return (directory / "key").read_text().strip()


def as_text(result: object) -> str:
    """Return a result in a form that two runs can be compared by."""
    return result.hex() if isinstance(result, bytes) else json.dumps(result, sort_keys=True)
