"""`StepMeter`: the costs of a step as metrics: times by phase, tokens and samples per second, MFU and peak memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rl_megatron import log
from rl_megatron.batching.batch import Batch
from rl_megatron.model.flops import count_model_flops
from rl_megatron.observability.cost_metrics import INNER_PHASES, OUTER_PHASES, TOKEN_PHASES, TRAINING_PHASES
from rl_megatron.timing import DevicePeak, HostClock, HostPeak, PhaseTimer, StepTimes, StreamClock
from rl_megatron.topology.gpus import find_gpu
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy


class StepMeter:
    """The costs of the steps of a stage. It owns the stage's timer.

    A step is everything between two calls of `metrics`, so an evaluation or a save counts in the step after it.
    """

    def __init__(self, topology: Topology, precision: str):
        """Start with no recorded costs. The GPU's peak speed depends on `precision`, "fp32" or "bf16"."""
        self._device, self._num_ranks, self._pipelined = topology.device, topology.world_size, topology.pipeline > 1
        clock, memory = (StreamClock(), DevicePeak()) if topology.is_cuda else (HostClock(), HostPeak())
        self.timer = PhaseTimer(clock, memory)
        gpu = find_gpu(torch.cuda.get_device_name()) if topology.is_cuda else None
        if topology.is_cuda and gpu is None:
            log.once(f"the peak speed of {torch.cuda.get_device_name()} is unknown, so there is no metric mfu")
        self._peak_tflops = None if gpu is None else gpu.tflops(precision)
        self._flops = 0.0
        self._samples = 0
        self._reduced: _OnHost | None = None

    def count_step(self, model: MegatronPolicy, batch: Batch, is_policy: bool) -> None:
        """Count a training step of `model` on all sequences of `batch`. Call it in the timer's training phase."""
        lengths = batch.lengths.tolist()
        self.timer.count_tokens(sum(lengths))
        if is_policy:
            self._samples = batch.size
        if log.is_main_rank():
            prefixes, tree = batch.prefixes if model.batching.share_prefixes else None, None
            if prefixes is not None:
                tree = prefixes.grow(range(batch.size), [max(length, 1) for length in lengths])
            self._flops += count_model_flops(model.model_config, model.vocab_size, model.model.head, lengths, tree)

    def metrics(self) -> dict[str, float]:
        """Return the costs since the last call. Times are those of this rank. Collective."""
        times = self.timer.collect()
        flops, samples, self._flops, self._samples = self._flops, self._samples, 0.0, 0
        metrics = time_metrics(times)
        step = times.total - times.sum_phase("evaluate") - times.sum_phase("save")
        metrics["samples_per_s"] = samples / step
        for name in TOKEN_PHASES:
            seconds = times.sum_phase(name)
            if seconds > 0 and name in times.tokens:
                metrics[f"tokens_per_s_{name}"] = times.tokens[name] / seconds
        trained = times.tokens.get("train", 0)
        metrics["tokens_per_s_per_rank"] = trained / step / self._num_ranks
        training = sum(map(times.sum_phase, TRAINING_PHASES))
        if training > 0:
            metrics["tflops_per_rank"] = flops / training / self._num_ranks / 1e12
            if self._peak_tflops is not None:
                metrics["mfu"] = metrics["tflops_per_rank"] / self._peak_tflops
        return metrics | self._reduce_over_ranks(times)

    def _reduce_over_ranks(self, times: StepTimes) -> dict[str, float]:
        """Return each phase's largest peak memory over the ranks, and the ranks' mean share of pipeline bubbles.

        On a GPU, the values are those of the previous step, so that the host need not wait for the GPU.
        """
        peaks = [float(times.peak_bytes.get(name, 0)) for name in OUTER_PHASES]
        values = torch.tensor(peaks, dtype=torch.float64)
        if self._pipelined:
            training = times.sum_phase("train")
            waited = times.split_phase("train").get("pipeline_wait", 0.0) / training if training > 0 else 0.0
            values = torch.cat([values, torch.tensor([waited / self._num_ranks], dtype=torch.float64)])
        values = values.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else values
        if self._pipelined:
            bubble = values[-1:].clone()
            dist.all_reduce(bubble)
            values[-1:] = bubble  # already summed, so MAX leaves it unchanged
        dist.all_reduce(values, dist.ReduceOp.MAX)
        reduced = _OnHost(values)
        available = self._reduced if self._device.type == "cuda" else reduced
        self._reduced = reduced
        if available is None:
            return {}
        *peaks, share = available.values() if self._pipelined else [*available.values(), 0.0]
        metrics = {f"peak_memory_{name}_gb": peak / 1e9 for name, peak in zip(OUTER_PHASES, peaks, strict=True) if peak}
        return metrics | ({"pipeline_bubble": share} if self._pipelined else {})


class _OnHost:
    """The values of a tensor, which a GPU copies to the host while work continues."""

    def __init__(self, tensor: torch.Tensor):
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        self._values = tensor
        if self._event is not None:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event.record()

    def values(self) -> list[float]:
        """Return the values, after waiting for the copy if it has not ended."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def time_metrics(times: StepTimes) -> dict[str, float]:
    """Return the seconds of a step, of each of its phases, of the parts of training, and of the rest.

    The phases and `time_other_s` add up to `time_step_s`. The parts of a training phase, with `time_train_other_s`, add
    up to that phase.
    """
    names = list(dict.fromkeys(path[0] for path in times.seconds if path))
    metrics = {"time_step_s": times.total}
    metrics |= {f"time_{name}_s": times.sum_phase(name) for name in names}
    metrics["time_other_s"] = times.seconds.get((), 0.0)
    for name in TRAINING_PHASES:
        if name in names:
            within = times.split_phase(name)
            metrics |= {f"time_{name}_{part}_s": within[part] for part in INNER_PHASES if part in within}
            metrics[f"time_{name}_other_s"] = times.seconds.get((name,), 0.0)
    return metrics
