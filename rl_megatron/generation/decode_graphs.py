"""Decoding steps in CUDA graphs: the host launches about a thousand kernels of a step with one call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.generation.replica import Replica

CudaGraphs = Literal["auto", "off"]
_MOST_GRAPHS = 128  # each graph keeps its kernels' arguments on the host and the device, a few MB for a deep model


class Graph(Protocol):
    """A step that was recorded."""

    def replay(self) -> None:
        """Run the step again, on the same tensors."""
        ...


@cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream for captures. There is only one, because cuBLAS keeps 32 MiB per stream on a Hopper GPU."""
    return torch.cuda.Stream()


class CudaRecorder:
    """A recorder of steps as CUDA graphs. All graphs share a memory pool, because no two run at the same time."""

    def __init__(self, stream: torch.cuda.Stream | None = None):
        self._stream, self._pool = stream or _capture_stream(), torch.cuda.graph_pool_handle()
        self._latest: Graph | None = None

    def __call__(self, step: Callable[[], None]) -> Graph:
        """Return the graph of a step without running the step."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads may use the GPU meanwhile, for example to send weights.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # the step may have ended the capture
                    self._end(graph)
                raise
            self._end(graph)
        torch.cuda.current_stream().wait_stream(stream)
        self._latest = graph  # torch refuses to capture into a memory pool whose graphs were all deleted
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # After a failed capture, torch before 2.12 still allocates in its pool, so `torch.cuda.empty_cache` raises.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise


class DecodeGraphs:
    """The graphs of a decoder's steps.

    A graph reads and writes the memory that its step used. So all graphs are dropped if a tensor that outlives the step
    has moved in memory. A step runs once before it is recorded, because its first run compiles or loads some kernels,
    which is not allowed in a capture.
    """

    def __init__(self, record: Callable[[Callable[[], None]], Graph], most_graphs: int = _MOST_GRAPHS):
        """Begin without graphs.

        Args:
            record: Returns the graph of a step without running it. If it raises RuntimeError, no later step is
                recorded.
            most_graphs: The maximum number of graphs; beyond it, the least recently used one is dropped.
        """
        self._record: Callable[[Callable[[], None]], Graph] | None = record
        self._most_graphs = most_graphs
        self._graphs: OrderedDict[Hashable, Graph | None] = OrderedDict()  # None: the step ran once
        self._addresses: tuple[int, ...] = ()

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Drop all graphs if one of these tensors, which steps read or write, has moved in memory."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run a step, or replay its graph. A step must not change anything on the host, or wait for the device.

        The key must contain everything on which the step depends, except the tensors that are passed to `follow`.
        """
        if self._record is None or key not in self._graphs:
            step()
            self._graphs[key] = None
        else:
            graph = self._graphs[key] or self._record_step(self._record, step)
            self._graphs[key] = graph
            (step if graph is None else graph.replay)()
        self._graphs.move_to_end(key)
        if len(self._graphs) > self._most_graphs:
            self._graphs.popitem(last=False)

    def _record_step(self, record: Callable[[Callable[[], None]], Graph], step: Callable[[], None]) -> Graph | None:
        try:
            return record(step)
        except RuntimeError as error:
            self._record = None
            self._graphs.clear()  # the graphs may occupy the memory that the step lacked
            log.once(f"decoding runs without CUDA graphs, because a step cannot be captured: {error}")
            return None


def make_graphs(replica: Replica, mode: CudaGraphs) -> DecodeGraphs | None:
    """Make the graphs of a replica's decoding steps, or return None if `mode`, the device or the model rules them out.

    If it is the model, the reason is logged once.
    """
    if mode == "off" or replica.device.type != "cuda":
        return None
    if replica.why_not_captured is not None:
        log.once(f"decoding runs without CUDA graphs: {replica.why_not_captured}")
        return None
    return DecodeGraphs(CudaRecorder())
