"""Faults inside the workers of a vLLM server, which imports this module for its `--worker-extension-cls`."""

from __future__ import annotations

from rl_megatron.weight_sync import vllm_sink

_REPACK, _LOAD = vllm_sink.repack_tied_head, vllm_sink.LayerwiseSink.load


class Faults:
    """Methods that `/collective_rpc` calls."""

    def inject(self, fault: str) -> None:
        """Inject one fault, or none, in place of the one before."""
        vllm_sink.repack_tied_head = (lambda head: None) if fault == "tied head" else _REPACK
        vllm_sink.LayerwiseSink.load = _load_all_but_one if fault == "skipped tensor" else _LOAD


def _load_all_but_one(sink: vllm_sink.LayerwiseSink, weights) -> None:
    """Load all tensors but one, as a model's loader may that does not know its name."""
    _LOAD(sink, ((name, weight) for name, weight in weights if name != "model.norm.weight"))
