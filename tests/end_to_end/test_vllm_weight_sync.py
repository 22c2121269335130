"""Weight syncs from two tensor-parallel ranks into two real vLLM servers, one of which has two workers.

The policy's head is tied to its embedding. Nothing may be learned from weights that are not the policy's.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.generation.completion_batch import SampledSequence, generate, make_completion_batch
from rl_megatron.generation.interfaces import Completion, Sampling, WeightSpan
from rl_megatron.generation.logprob_check import LIMITS, EngineMismatch, LogprobCheck
from rl_megatron.generation.servers.client import ServerClient
from rl_megatron.generation.transformers.model import build_model, checkpoint_tensors
from rl_megatron.topology.rank_zero_loop import RankZeroLoop
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.exporter import WeightExporter
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused, WeightServers
from rl_megatron.weight_sync.vllm_sync import make_vllm_sync
from rl_megatron.weight_sync.weights_on_disk import WeightDirectory
from tests.parallel.layouts import build_policy
from tests.vllm_servers import model_of_runs, needs_vllm

pytestmark = needs_vllm

MODEL = model_of_runs()
BUCKET_BYTES = 60_000  # gives several buckets, and layers that are divided among buckets
DOWN = "model.layers.1.mlp.down_proj.weight"
SHORT, LONG = [7, 3, 100], [(5 * i * i + i) % 128 for i in range(200)]  # the long one fills a block of a prefix cache
PROMPTS = [SHORT, [9, *SHORT], LONG, [9, *LONG]]  # each server gets a short one and a long one
SAMPLING = Sampling(max_new_tokens=8)


class Trainer:
    """A policy whose weights change, and the servers that get them. Every rank has one."""

    def __init__(self, urls: list[str], refit: str, directory: Path):
        self.policy = build_policy({"tensor": 2}, MODEL, vocab_size=MODEL.vocab_size)
        ranks = self.policy.topology.ranks
        self.ranks, self._loop = ranks, RankZeroLoop(ranks, 60, "requests to servers", (ServerDied, ServerRefused))
        self.servers = [
            ServerClient("the server", url, self._loop.loop, "/health", timeout_seconds=60)
            for url in (urls if ranks.leads else ())
        ]
        self.connect(refit, directory)
        self.check = LogprobCheck(self.policy, Ids(), SAMPLING, len(PROMPTS), LIMITS["fp32"])

    def connect(self, refit: str, directory: Path) -> None:
        servers = WeightServers(self.servers, self.ranks, timeout_seconds=60)
        self.sync = make_vllm_sync(
            refit, self.policy.weights, servers, bucket_bytes=BUCKET_BYTES, timeout_seconds=60, directory=directory
        )
        self.sync.connect()

    @torch.no_grad()
    def change(self, seed: int, only: str = "") -> None:
        """Add noise to all parameters, or to those whose name contains `only`."""
        for name, parameter in self.policy.model.model_chunks[0].named_parameters():
            if only in name:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.add_(0.05 * noise)

    def complete(self, requests):
        """Do what `LogprobCheck` needs of a `RolloutEngine`."""
        return [self._complete(number, request) for number, request in enumerate(requests)]

    def _complete(self, number, request) -> Completion:
        server, request_id = self.servers[number % len(self.servers)], f"{number}-{time.monotonic()}"
        body = question(request_id, list(request.prompt), request.sampling.max_new_tokens, request.seed)
        (choice,) = asked(server, GENERATE, body)["choices"]
        spans = tuple(WeightSpan(int(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"])
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        return Completion(request_id, tuple(choice["token_ids"]), logprobs, spans, "length")

    def failure(self, version: int) -> tuple[str, str] | None:
        """Sync the weights and check the logprobs; return what stopped that, or None."""
        try:
            self.sync.send(version)
            self.check.run(self, PROMPTS)  # pyright: ignore[reportArgumentType]
        except (WeightsRefused, ServerRefused, ServerDied, EngineMismatch) as error:
            return type(error).__name__, str(error)
        return None

    def tell(self, path: str, body: dict, of: slice = slice(None)) -> None:
        """Send a request to some of the servers, and wait for the answers."""
        self.ranks.share(lambda: [asked(server, path, body) for server in self.servers[of]])

    def inject(self, fault: str, of: slice = slice(None)) -> None:
        """Inject a fault of tests/vllm_faults.py into all workers of some of the servers, or none."""
        self.tell("/collective_rpc", {"method": "inject", "args": [fault]}, of)


GENERATE = "/inference/v1/generate"


def asked(server: ServerClient, path: str, body: dict) -> Any:
    return server.request("POST", path, body).result()


def question(request_id: str, prompt: list[int], max_tokens: int, seed: int) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "seed": seed, "ignore_eos": True}
    return {"request_id": request_id, "token_ids": prompt, "sampling_params": sampling}


class Ids:
    """A tokenizer, for messages."""

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))


# --- weights that arrive ---


def difference_from_transformers(trainer: Trainer) -> tuple[float, list]:
    """Return the largest difference of the server's logprobs from transformers', and the versions of the tokens."""
    model = build_model(trainer.policy.weights.plan, torch.device("cpu"))
    model.set_attn_implementation("sdpa")  # transformers' own, without the engine's cache
    tensors = checkpoint_tensors(model)
    for name, weight in trainer.policy.weights.stream():
        tensors[name].copy_(weight)
    batch, worst = generate(trainer, PROMPTS, SAMPLING, 5), 0.0
    for sequence, start in enumerate(batch["prompt_lengths"].tolist()):
        end = int(batch["input_lengths"][sequence])
        ids = batch["input_ids"][sequence, :end]
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        for position in range(start, end):
            theirs = batch["generation_logprobs"][sequence, position]
            worst = max(worst, (logprobs[position - 1, ids[position]] - theirs).abs().item())
    return worst, batch["weight_version"].tolist()


def three_updates(urls: list[str], refit: str, directory: Path) -> list:
    trainer, results = Trainer(urls, refit, directory), []
    for version in (11, 12, 13):
        trainer.change(version)
        metrics = trainer.sync.send(version)
        results.append((*difference_from_transformers(trainer), metrics["refit_bytes"]))
    trainer.sync.close()
    return results


@pytest.mark.parametrize("refit", ["collective", "shared_memory"])
def test_a_server_computes_with_the_policys_weights_after_each_of_three_updates(urls, ranks, tmp_path, refit):
    results, _ = ranks.run(2, three_updates, urls, refit, tmp_path)
    for version, (worst, versions, num_bytes) in zip((11, 12, 13), results, strict=True):
        assert worst <= 1e-5
        assert versions == [version] * len(PROMPTS)
        assert num_bytes == results[0][2] > BUCKET_BYTES


def updated_while_a_request_is_paused(urls: list[str], directory: Path) -> tuple[list, float]:
    """Return the weight spans of a request, and the largest difference of logprobs under the weights of the second."""
    trainer, box = Trainer(urls, "collective", directory), []
    trainer.sync.send(1)
    if trainer.ranks.leads:
        box.append(trainer.servers[0].request("POST", GENERATE, question("paused", PROMPTS[0], 200, seed=3)))
        time.sleep(0.2)
    trainer.tell("/pause?mode=keep", {})
    trainer.change(2)
    trainer.sync.send(2)
    trainer.tell("/resume", {})
    choice = trainer.ranks.share(lambda: box[0].result()["choices"][0])
    spans = [(int(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]]
    logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
    whole = (WeightSpan(2, 0, len(logprobs)),)
    completion = Completion("", tuple(choice["token_ids"]), logprobs, whole, "length")
    ids, start = [*PROMPTS[0], *completion.ids], len(PROMPTS[0])
    batch = make_completion_batch([SampledSequence(ids, ((start, completion),), SAMPLING)])
    difference = (trainer.policy.get_logprobs(batch)["logprobs"] - batch["generation_logprobs"]).abs()[0]
    trainer.sync.close()
    return spans, difference[len(PROMPTS[0]) + spans[-1][1] :].max().item()


def test_a_paused_request_continues_with_the_new_weights_alone(urls, ranks, tmp_path):
    spans, difference = ranks.run(2, updated_while_a_request_is_paused, urls, tmp_path)[0]
    (first, start, between), (second, after, end) = spans
    assert (first, second, start, end) == (1, 2, 0, 200) and 0 < between == after < 200
    assert difference <= 1e-5  # keys and values of the first weights would show here


# --- faults, with the plugin ---


def zeroed(bucket, filled, index) -> None:
    """Drop a tensor: its place in the bucket stays empty."""
    bucket.tensor(filled, index).zero_()


def altered(bucket, filled, index) -> None:
    bucket.tensor(filled, index).view(-1)[5] += 1e-3


def with_fault(trainer: Trainer, fault: str):
    """Inject a fault, and return a function that takes it away again. Those in a server are in the second one."""
    fill, request = WeightExporter.fill, ServerClient.request
    if fault in ("dropped", "altered"):
        harm = zeroed if fault == "dropped" else altered

        def fill_wrongly(self, bucket_index, buffer):
            filled, bucket = fill(self, bucket_index, buffer), self.plan.buckets[bucket_index]
            for index, spec in enumerate(bucket.tensors):
                if spec.name == DOWN:
                    harm(bucket, filled, index)
            return filled

        WeightExporter.fill = fill_wrongly
    elif fault == "stale version":

        def without_a_version(self, method, path, body=None, timeout_seconds=None):
            forgets = path == "/finish_weight_update" and self is trainer.servers[1]
            return request(self, method, path, {} if forgets else body, timeout_seconds)

        ServerClient.request = without_a_version
    else:
        trainer.inject(fault, slice(1, 2))

    def undo() -> None:
        WeightExporter.fill, ServerClient.request = fill, request
        trainer.inject("")

    return undo


FAULTS = {
    "dropped": ("WeightsRefused", f"vLLM server 0, worker 0: {DOWN} arrived altered: its fingerprint is 0x0"),
    "altered": ("WeightsRefused", f"vLLM server 0, worker 0: {DOWN} arrived altered"),
    "stale version": ("ServerRefused", "reports version"),
    "tied head": ("WeightsRefused", "vLLM server 1, worker 0: lm_head.weight is not the embedding that arrived"),
    "skipped tensor": ("WeightsRefused", "model.norm.weight of the server's model is missing"),
}


def faults_with_the_plugin(urls: list[str], refit: str, directory: Path) -> dict:
    """Return what stops the trainer for each fault, and what stops it after a sync without the fault: nothing."""
    trainer, found, version = Trainer(urls, refit, directory), {}, 20
    for fault in FAULTS:
        trainer.change(version)
        undo = with_fault(trainer, fault)
        stopped = trainer.failure(version + 1)
        undo()
        found[fault] = stopped, trainer.failure(version + 2)
        version += 2
    trainer.sync.close()
    return found


@pytest.mark.parametrize("refit", ["collective", "shared_memory"])
def test_a_fault_stops_the_trainer_before_it_learns_and_is_named(urls, ranks, tmp_path, refit):
    first, second = ranks.run(2, faults_with_the_plugin, urls, refit, tmp_path)
    assert first == second
    for fault, (kind, message) in FAULTS.items():
        stopped, afterwards = first[fault]
        assert stopped is not None and stopped[0] == kind and message in stopped[1], (fault, stopped)
        assert afterwards is None, (fault, afterwards)


# --- faults, without the plugin: vLLM's own reload from disk, which is the stock way that runs on a CPU ---


def faulty_files(directory: Path, fault: str, before: Path | None) -> None:
    """Alter the files of the weights after they were written and verified."""
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        if fault == "stale version" and before is not None:
            weights = load_file(before / file.name)
        elif fault == "dropped" and DOWN in weights:
            del weights[DOWN]
        elif fault == "altered" and DOWN in weights:
            weights[DOWN][:8] *= 1.5
        save_file(weights, file, {"format": "pt"})


def faults_without_the_plugin(urls: list[str], directory: Path) -> dict:
    trainer, found, version = Trainer(urls, "collective", directory), {}, 40
    trainer.sync.send(version)  # the head gets the embedding's values, which vLLM's own reload would not give it
    trainer.sync.close()
    trainer.connect("disk", directory)
    write, kept = WeightDirectory.write, directory / "before"
    for fault in ("none", "dropped", "altered", "stale version", "tied head"):
        trainer.change(version, only="embedding" if fault == "tied head" else "layers")

        def write_wrongly(self, name, sender, fault=fault):
            written = write(self, name, sender)
            if trainer.ranks.leads:
                faulty_files(written, fault, kept if kept.exists() else None)
                kept.mkdir(exist_ok=True)
                for file in written.glob("*.safetensors"):
                    (kept / file.name).write_bytes(file.read_bytes())
            return written

        WeightDirectory.write = write_wrongly
        try:
            found[fault] = trainer.failure(version + 1)
        finally:
            WeightDirectory.write = write
        if fault != "tied head":
            assert trainer.failure(version + 2) is None  # the next sync without a fault mends it
        version += 2
    trainer.sync.close()
    return found


def test_the_logprob_check_catches_faults_of_a_server_that_verifies_nothing(urls, ranks, tmp_path):
    first, second = ranks.run(2, faults_without_the_plugin, urls, tmp_path)
    assert first == second and first.pop("none") is None
    assert set(first) == {"dropped", "altered", "stale version", "tied head"}
    for fault, stopped in first.items():
        assert stopped is not None and stopped[0] == "EngineMismatch", (fault, stopped)
    assert list(tmp_path.glob("*weights-*")) == []


# --- a server that dies ---


def sync_while_the_server_is_killed(urls: list[str], pid: int, directory: Path) -> tuple[str, float]:
    trainer = Trainer(urls, "collective", directory)
    trainer.sync.send(1)
    fill, filled = WeightExporter.fill, []

    def kill_in_the_second_bucket(self, bucket_index, buffer):
        filled.append(bucket_index)
        if len(filled) == 2 and trainer.ranks.leads:
            os.killpg(pid, signal.SIGKILL)
        return fill(self, bucket_index, buffer)

    WeightExporter.fill = kill_in_the_second_bucket
    began = time.monotonic()
    try:
        trainer.sync.send(2)
        return "nothing", 0.0
    except ServerDied as error:
        return str(error), time.monotonic() - began
    finally:
        WeightExporter.fill = fill
        trainer.sync.close()


def test_every_rank_hears_of_a_server_that_is_killed_in_a_weight_sync(faulty_servers, urls, ranks, tmp_path):
    (server,) = psutil.Process(faulty_servers[1].processes[0].pid).children()
    for message, seconds in ranks.run(2, sync_while_the_server_is_killed, urls, server.pid, tmp_path):
        assert urls[1] in message or "process group" in message
        assert seconds < 30
