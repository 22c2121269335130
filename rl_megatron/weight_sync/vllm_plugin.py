"""The weight-transfer backend `rl_megatron` of vLLM, which runs in the workers of a vLLM server.

vLLM calls `register` in each of its processes, because the package names it in the entry-point group
`vllm.general_plugins`. A server uses the backend if it was started with
`--weight-transfer-config '{"backend": "rl_megatron"}'`. The trainer's side is `weight_sync.vllm_sync`.

vLLM's environment has torch, but not the dependencies of this package. So this module and all that it imports need only
torch and the standard library. vLLM itself is imported inside functions.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused
from rl_megatron.weight_sync.ipc import WeightHandle, open_handle
from rl_megatron.weight_sync.process_group import StandaloneGroup
from rl_megatron.weight_sync.receiver import WeightReceiver
from rl_megatron.weight_sync.vllm_sink import LayerwiseSink

BACKEND = "rl_megatron"
REPORT = "rl_megatron_report"  # the method of vLLM's workers that returns `VllmReceiver.report`
PROTOCOL = 1  # increased when trainers can no longer talk to older plugins


def register() -> None:
    """Register the backend with vLLM, and add the method `rl_megatron_report` to its workers."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # pyright: ignore[reportMissingImports]
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )
    from vllm.v1.worker.worker_base import WorkerBase  # pyright: ignore[reportMissingImports]

    if hasattr(WorkerBase, REPORT):
        return  # vLLM may load plugins several times

    class VllmWeightTransferEngine(VllmReceiver, WeightTransferEngine):
        pass

    WeightTransferEngineFactory.register_engine(BACKEND, VllmWeightTransferEngine)
    setattr(WorkerBase, REPORT, lambda worker: report_state(worker.weight_transfer_engine))


def report_state(engine: object) -> dict[str, object]:
    """Return the report of a worker's weight-transfer engine, or a failure if the engine is not this backend."""
    if isinstance(engine, VllmReceiver):
        return engine.report()
    backend = "no weight-transfer backend" if engine is None else f"the backend {type(engine).__name__}"
    return {"protocol": PROTOCOL, "failed": f"the server was started with {backend}"}


@dataclass
class InitInfo:
    """The body of `/init_weight_transfer_engine`.

    Attributes:
        protocol: The trainer's `PROTOCOL`.
        plan: `RefitPlan.to_json` of the trainer's plan.
        group: address, port, rank_offset, world_size and timeout_seconds of the process group to join. `rank_offset` is
            the rank of the server's first worker. None: weights arrive through shared memory.
    """

    protocol: int
    plan: dict[str, Any]
    group: dict[str, Any] | None = None


@dataclass
class UpdateInfo:
    """The body of `/update_weights`.

    Attributes:
        version: The version of the weights.
        handle: `WeightHandle.to_json` of a bucket in shared memory. None: all buckets arrive over the process group.
    """

    version: int
    handle: dict[str, Any] | None = None


class VllmReceiver:
    """One worker's side of a weight sync, with the methods of vLLM's `WeightTransferEngine`.

    From the start of a weight sync until all weights have been received and verified, the model computes no logits. A
    request that runs nevertheless raises an exception, which ends the server's engine.

    No method raises an exception. vLLM reads the answers of its workers only up to the first exception, and would
    mistake the remaining answers for those to its next request. So failures are kept for `report`.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    # vLLM's base class sets these.
    model: torch.nn.Module
    model_config: Any
    parallel_config: Any
    device: torch.device

    _receiver: WeightReceiver | None = None
    _sink: LayerwiseSink | None = None
    _group: StandaloneGroup | None = None
    _refused: str | None = None
    _failed: str | None = None
    _active = False  # whether vLLM considers a weight update as begun

    def report(self) -> dict[str, Any]:
        """Return the state of this worker, for a JSON answer.

        The keys are `protocol`; `version`, the version of the weights that the worker serves, or None; `refused`, the
        reason why weights were refused; `failed`, any other exception; `active`, whether vLLM waits for
        `/finish_weight_update`; and `seconds`, the time of each phase of the last weight sync.
        """
        receiver = self._receiver
        return {
            "protocol": PROTOCOL,
            "version": None if receiver is None else receiver.version,
            "refused": self._refused,
            "failed": self._failed,
            "active": self._active,
            "seconds": {} if receiver is None else receiver.seconds,
        }

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Take the trainer's plan, and join the trainer's process group, after leaving an earlier one."""
        self._refused = self._failed = None
        self.shutdown()
        with self._keep_failures():
            if init_info.protocol != PROTOCOL:
                raise RuntimeError(
                    f"the trainer speaks version {init_info.protocol} of the plugin's protocol, but the server's "
                    f"rl_megatron speaks {PROTOCOL}; install the trainer's version into the server's environment"
                )
            self._sink = LayerwiseSink(self.model, self.model_config)
            self._receiver = WeightReceiver(self._sink, RefitPlan.from_json(init_info.plan))
            if init_info.group is not None:
                self._join(**init_info.group)

    def start_weight_update(self) -> None:
        """Begin a weight sync. The model computes no logits from now on."""
        self._active, self._refused, self._failed = True, None, None
        with self._keep_failures():
            if self._sink is None:
                raise RuntimeError("a weight sync began before /init_weight_transfer_engine")
            self._sink.begin()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive all weights over the process group, or one bucket through shared memory."""
        with self._keep_failures():
            if self._receiver is None or self._failed is not None or self._refused is not None:
                return
            if update_info.handle is None:
                if self._group is None:
                    raise RuntimeError("the server has not joined the trainer's process group")
                self._receiver.receive(self._group, update_info.version)
                return
            handle = WeightHandle.from_json(update_info.handle)
            if handle.bucket_index == 0:
                self._receiver.begin(update_info.version)
            with open_handle(handle) as words:
                self._receiver.accept(handle.bucket_index, words)

    def finish_weight_update(self) -> None:
        """Serve the weights if all of them arrived. Otherwise the model still computes no logits."""
        self._active = False
        with self._keep_failures():
            if self._receiver is None or self._sink is None or self._failed is not None or self._refused is not None:
                return
            if self._receiver.version is None:  # over a group, `receive` has finished already
                self._receiver.finish()
            try:
                self._sink.finish()
            except Exception:
                self._receiver.version = None
                raise

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _join(self, address: str, port: int, rank_offset: int, world_size: int, timeout_seconds: float) -> None:
        parallel = self.parallel_config
        rank = rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = StandaloneGroup(address, port, rank, world_size, self.device, timeout_seconds)

    @contextmanager
    def _keep_failures(self) -> Iterator[None]:
        """Keep an exception for `report`.

        Unless weights were refused, leave the process group, because the trainer would otherwise wait for this worker
        until a collective times out.
        """
        try:
            yield
        except WeightsRefused as error:  # all weights have been received by then
            self._refused = str(error)
        except Exception as error:
            traceback.print_exc()
            self._failed = f"{type(error).__name__}: {error}"
            self.shutdown()
