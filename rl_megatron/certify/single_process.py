"""The reference that layouts are compared with: the workload on one rank, in one microbatch, in a separate process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from rl_megatron import log
from rl_megatron.batching.config import Batching
from rl_megatron.certify.measurement import Measurement, run_workload
from rl_megatron.certify.workload import NUM_SEQUENCES, Workload
from rl_megatron.config.loading.registry import import_plugins
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.workers.child_process import build_child_environment


def run_in_one_process(workload: Workload, device: str = "auto") -> dict[str, Measurement]:
    """Return the measurements of the workload in this process: one rank, one padded microbatch, and whole logits."""
    layout = topology.build(ParallelConfig(), start_device(device), workload.seed)
    whole = {name: Batching("padded", NUM_SEQUENCES) for name in workload.objectives}
    return run_workload(workload.without_savings(), layout, whole)


class Reference:
    """A process that calls `run_in_one_process` while these ranks run the workload in the layout."""

    def __init__(self, workload: Workload, directory: Path, device: str, plugins: Sequence[str] = ()):
        """Start the process. It writes its results to `directory`, and imports `plugins`, which may define losses."""
        self._result = directory / "reference.pt"
        environment = build_child_environment()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # so that the plugins are found
        command = [sys.executable, "-m", __name__, str(self._result)]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        # Only this process can write to the pipe, so the child may unpickle what it reads there.
        pipe, self._process.stdin = self._process.stdin, None
        if pipe is not None:
            with suppress(BrokenPipeError), pipe:  # `finish` reports a child that has ended
                pipe.write(pickle.dumps((workload, device, list(plugins))))

    def finish(self) -> dict[str, Measurement] | str:
        """Wait for the process; return its measurements, or an error message with its last output if it failed."""
        _, output = self._process.communicate()
        if self._process.returncode:
            return f"the reference process failed: {output.decode(errors='replace')[-2000:]}"
        saved = torch.load(self._result, weights_only=True)
        return {name: Measurement(**values) for name, values in saved.items()}

    def stop(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()


def _main(result_path: str) -> None:
    log.setup()
    workload, device, plugins = pickle.load(sys.stdin.buffer)
    import_plugins(plugins)
    measured = run_in_one_process(workload, device)
    torch.save({name: vars(measurement) for name, measurement in measured.items()}, result_path)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
