"""GRPO with real vLLM servers and tied embeddings on two tensor-parallel ranks: faults, and servers that are killed.

The ranks call `run` themselves, so that a test can break what they send, or kill a server at a chosen moment.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import httpx2
import psutil
import pytest

from rl_megatron.config.loading.load import load_config
from rl_megatron.config.metrics import is_cost
from tests.end_to_end.launch import TINY_GRPO, metrics
from tests.end_to_end.listening import reached_from_outside, watched
from tests.end_to_end.weight_versions import difference_from_versions
from tests.vllm_servers import OF_RUNS, PYTHON, needs_vllm

pytestmark = needs_vllm

GRPO = (
    *TINY_GRPO, *OF_RUNS, "train.steps=4", "parallel.tensor=2", "optimizer.lr=1e-3", "generation.engine=vllm",
    "generation.refit_bucket_mb=0.05",
)  # fmt: skip
DOWN = "model.layers.1.mlp.down_proj.weight"
GENERATE, FINISH = "/inference/v1/generate", "/finish_weight_update"
NOISE = ("refit_", "gate_", "mismatch")  # what depends on a server's rounding


def train(directory: Path, *keys: str) -> tuple[int, str]:
    """Run GRPO on this rank, and return the exit status and the standard error."""
    from rl_megatron.runs.run import run

    with redirect_stderr(io.StringIO()) as stderr:
        status = run(load_config([*GRPO, *keys, f"output_dir={directory}"]))
    return status, stderr.getvalue()


def named(urls: list[str]) -> str:
    return f"generation.vllm.server_urls=[{','.join(urls)}]"


# --- faults ---


@contextmanager
def fault_injected(fault: str, urls: list[str]):
    """Break weight syncs: on the rank that sends, or in the second server."""
    from rl_megatron.generation.servers.client import ServerClient
    from rl_megatron.weight_sync.exporter import WeightExporter

    fill, call = WeightExporter.fill, ServerClient.call

    def fill_wrongly(self, bucket_index, buffer):
        filled, bucket = fill(self, bucket_index, buffer), self.plan.buckets[bucket_index]
        for index, spec in enumerate(bucket.tensors):
            if spec.name == DOWN:
                place = bucket.tensor(filled, index)
                place.zero_() if fault == "dropped" else place.view(-1)[5].add_(1e-3)
        return filled

    async def call_wrongly(self, method, path, body=None, seconds=None):
        if fault == "stale version" and path == FINISH and self.url == urls[1]:
            body = {}
        return await call(self, method, path, body, seconds)

    if fault in ("dropped", "altered"):
        WeightExporter.fill = fill_wrongly
    if fault == "tied head":
        inject(urls[1], fault)
    ServerClient.call = call_wrongly
    try:
        yield
    finally:
        WeightExporter.fill, ServerClient.call = fill, call


def runs_with_faults(urls: list[str], directory: Path) -> dict[str, tuple[int, str]]:
    found = {}
    for seed, fault in enumerate(FAULTS):  # other initial weights: a head that is left behind is wrong at once
        with fault_injected(fault, urls):
            found[fault] = train(directory / fault, named(urls), f"train.seed={seed}")
    inject(urls[1], "")
    return found


def inject(url: str, fault: str) -> None:
    """Inject a fault of tests/vllm_faults.py into all workers of a server, or none."""
    httpx2.post(f"{url}/collective_rpc", json={"method": "inject", "args": [fault]}).raise_for_status()


FAULTS = {
    "dropped": f"vLLM server 0, worker 0: {DOWN} arrived altered: its fingerprint is 0x0",
    "altered": f"vLLM server 0, worker 0: {DOWN} arrived altered",
    "stale version": "vLLM server 1 reports version",
    "tied head": "vLLM server 1, worker 0: lm_head.weight is not the embedding that arrived",
}


def test_each_fault_of_a_weight_sync_ends_the_run_before_it_learns(urls, ranks, tmp_path):
    first, second = ranks.run(2, runs_with_faults, urls, tmp_path)
    for fault, message in FAULTS.items():
        status, stderr = first[fault]
        assert status == second[fault][0] == 1
        (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert message in line, (fault, line)
        assert (tmp_path / fault / "config.yaml").exists() and metrics(tmp_path / fault) == []


# --- servers that are killed ---


def kill_a_server() -> None:
    """Kill one of the vLLM servers that this process has started, if it has: the child of a guardian."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a short-lived process of a server has ended in the meantime
            guardian, command = process.parent(), process.cmdline()
            if guardian is not None and "guardian" in " ".join(guardian.cmdline()):
                assert "vllm.entrypoints.cli.main" in command and "serve" in command
                process.kill()
                return


REWARD = """
def even(completion_ids, **_):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""


def rewarded(directory: Path) -> str:
    """Return the override that chooses a reward which differs among completions of an untrained model."""
    directory.mkdir(exist_ok=True)
    (directory / "even.py").write_text(REWARD)
    return f"reward.functions=[{{path: {directory / 'even.py'}, name: even}}]"


def undisturbed_run(urls: list[str], directory: Path) -> tuple[int, str]:
    return train(directory, named(urls), rewarded(directory.parent / "reward"))


def run_with_kills(directory: Path, kills: int) -> tuple[int, str]:
    """Kill one of two servers while they generate for the second step; the second kill is in the last weight sync."""
    from rl_megatron.generation.servers.client import ServerClient
    from rl_megatron.weight_sync.exporter import WeightExporter

    fill, call, seen = WeightExporter.fill, ServerClient.call, {"answers": 0, "last buckets": 0}

    async def call_and_kill(self, method, path, body=None, seconds=None):
        answer = await call(self, method, path, body, seconds)
        seen["answers"] += path == GENERATE
        if seen["answers"] == 1:
            async with httpx2.AsyncClient() as stranger:
                refused = await stranger.get(f"{self.url}/version")
            (directory.parent / "refused").write_text(refused.text if refused.status_code == 401 else "answered")
        if path == GENERATE and seen["answers"] == 40:
            kill_a_server()
        return answer

    def fill_and_kill(self, bucket_index, buffer):
        if bucket_index == len(self.plan.buckets) - 1:
            seen["last buckets"] += 1
            if seen["last buckets"] == 5 and kills == 2:
                kill_a_server()
        return fill(self, bucket_index, buffer)

    WeightExporter.fill, ServerClient.call = fill_and_kill, call_and_kill
    try:
        launched = (f"generation.vllm.python={PYTHON}", "generation.vllm.num_servers=2")
        return train(directory, *launched, rewarded(directory.parent / "reward"))
    finally:
        WeightExporter.fill, ServerClient.call = fill, call


def results_of(directory: Path) -> list[dict]:
    lines = metrics(directory, timed=True)
    return [
        {key: value for key, value in line.items() if not (is_cost(key) or any(noise in key for noise in NOISE))}
        for line in lines
    ]


def test_a_run_whose_servers_are_killed_has_the_metrics_of_an_undisturbed_run(urls, ranks, tmp_path, is_nightly):
    """`test_vllm_weight_sync` kills a server in a weight sync. A start takes a minute, so that one kill is enough."""
    kills = 2 if is_nightly else 1
    with watched([os.getpid()]) as addresses:
        (status, stderr), (_, of_rank_1) = ranks.run(2, run_with_kills, tmp_path / "killed", kills)
    assert addresses and reached_from_outside(addresses) == []
    assert status == 0, stderr + of_rank_1
    assert [f"starting again ({n} of at most 3 times)" in stderr for n in (1, 2, 3)] == [n <= kills for n in (1, 2, 3)]
    assert "only requests with the token of its run" in (tmp_path / "refused").read_text()
    assert ranks.run(2, undisturbed_run, urls, tmp_path / "undisturbed")[0][0] == 0
    killed, undisturbed = results_of(tmp_path / "killed"), results_of(tmp_path / "undisturbed")
    assert len(killed) == len(undisturbed) >= 4
    for line, wanted in zip(killed, undisturbed, strict=True):
        for name in ("stage", "kind"):
            assert line.pop(name) == wanted.pop(name)
        assert line == pytest.approx(wanted, rel=1e-4, abs=1e-6, nan_ok=True)


LONG = """
import asyncio


async def long(client, record, sampling):
    history = client.history()
    for _ in range(3):
        await history.complete(sampling)
        history.extend([{"role": "user", "content": " x"}])
        await asyncio.sleep(0.5)
    return [history.trajectory()]
"""


def run_asynchronously(urls: list[str], directory: Path, steps: int) -> tuple[int, str]:
    """Run asynchronous steps, whose trajectories take longer than a step."""
    worker = directory.parent / "worker.py"
    worker.write_text(LONG)
    long = (
        "rollout.async_enabled=true", "rollout.max_trajectory_age_steps=2", f"train.steps={steps}",
        "train.save_every=1", "train.keep_checkpoints=40", "train.eval_every=0", "train.global_batch_size=16",
        "train.micro_batch_tokens=512", "generation.max_new_tokens=24", "optimizer.lr=3e-3",
        f"rollout.worker={worker}:long", "loss.reference_policy_kl_penalty=0",
    )  # fmt: skip
    return train(directory, *long, named(urls), rewarded(directory.parent / "reward"))


def test_asynchronous_steps_know_the_weights_of_every_token(urls, ranks, tmp_path, is_nightly):
    num_steps = 30 if is_nightly else 6
    (status, stderr), _ = ranks.run(2, run_asynchronously, urls, tmp_path / "out", num_steps)
    assert status == 0, stderr
    steps = [line for line in metrics(tmp_path / "out", timed=True) if line["kind"] == "train"]
    assert len(steps) == num_steps and all(step["trajectory_age_max"] <= 2 for step in steps)
    assert all(step["gate_mean"] < 1e-4 for step in steps if "gate_mean" in step)
    assert sum("gate_mean" in step for step in steps) >= num_steps - 1, "the logprob check follows every weight sync"
    (found,) = ranks.run(1, difference_from_versions, tmp_path / "out")
    assert found["mixed"] > 0, "weights arrived while trajectories ran"
    assert found["tokens"] > 150 * num_steps and found["largest"] < 1e-3 and found["of_another"] > 10 * found["largest"]
