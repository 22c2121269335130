"""Load a model and serve it, for `rl-megatron training-server`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl_megatron import log
from rl_megatron.batching.config import Batching
from rl_megatron.checkpoint.hf_weights import open_hugging_face
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.evaluation.generate import run_command
from rl_megatron.runs.lock import OutputLock
from rl_megatron.service.api import Base
from rl_megatron.service.executor import Executor
from rl_megatron.service.run_states import RunStates
from rl_megatron.service.server import Service, ServiceSettings
from rl_megatron.service.stops import StopRules
from rl_megatron.service.trainer import ServiceTrainer
from rl_megatron.topology import degrees
from rl_megatron.topology.topology import Topology, start_topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.runner import FusedHead


@dataclass(frozen=True)
class ServiceJob:
    """A model to serve.

    Attributes:
        stage: The model, the layout and how sequences form microbatches.
        weights: A checkpoint, or a Hugging Face directory.
        tokenizer: Its tokenizer.
        name: The name by which clients ask for the model.
        directory: The directory of the service.
        host: The address at which rank 0 listens.
        port: The port.
        keys: The owner of each key, on rank 0.
        runs_in_memory: How many training runs are in memory at most; the others are on the disk.
    """

    stage: StageConfig
    weights: Path
    tokenizer: Tokenizer
    name: str
    directory: Path
    host: str
    port: int
    keys: Mapping[str, str]
    runs_in_memory: int


def serve_training(job: ServiceJob) -> int:
    """Serve the model until a signal ends it, and return the exit status, the same on all ranks."""
    opened: list[Service] = []

    def close() -> None:
        for service in opened:
            service.close()

    return run_command(lambda: _serve(job, opened), close)


def _serve(job: ServiceJob, opened: list[Service]) -> None:
    stage = job.stage
    timeout_minutes = stage.train.collective_timeout_minutes
    layout = start_topology(stage.parallel, device=stage.device, timeout_minutes=timeout_minutes)
    degrees.validate_model(stage.model, stage.parallel)
    check_vocabulary(stage.model, job.tokenizer.vocab_size)
    lock = OutputLock(job.directory)
    layout.ranks.run_on_rank0(lambda: _lock(lock, job.directory))
    policy = _load_policy(job, layout)
    is_hugging_face = not (job.weights / MANIFEST).is_file()
    runs = RunStates(layout.ranks, job.directory / "idle", job.runs_in_memory)
    executor = Executor(ServiceTrainer(policy), runs, str(job.weights) if is_hugging_face else None)
    tokenizer = stage.tokenizer.path
    base = Base(
        job.name, tokenizer, job.tokenizer.vocab_size, stage.model.max_sequence_length,
        StopRules.from_tokenizer(job.tokenizer),
    )  # fmt: skip
    settings = ServiceSettings(job.host, job.port, job.directory, job.keys, stage.train.seed)
    service = Service(executor, base, settings, layout.ranks, timeout_minutes * 60)
    opened.append(service)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    if layout.ranks.leads:
        log.LOGGER.info("serving %s at %s; clients set TINKER_BASE_URL to this address", job.name, service.url)
    service.run()
    layout.ranks.run_on_rank0(lock.release)
    policy.shutdown()


def _lock(lock: OutputLock, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    lock.acquire()


def _load_policy(job: ServiceJob, layout: Topology) -> MegatronPolicy:
    stage = job.stage
    policy = MegatronPolicy(
        replace(stage.model, backend="portable"),  # its layers take adapters
        layout,
        vocab_size=job.tokenizer.vocab_size,
        precision=stage.precision,
        batching=replace(Batching.from_config(stage.train), kind="packed"),
        fused_head=FusedHead() if stage.train.fused_head else None,
        initialise=False,
    )
    if (job.weights / MANIFEST).is_file():
        policy.load_checkpoint(job.weights, weights_only=True)
    else:
        layout.ranks.all_or_none(lambda: open_hugging_face(job.weights)).load_into(policy.model)
    return policy
