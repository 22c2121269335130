"""Decoding steps in CUDA graphs: the host starts a step's thousand kernels with one call, instead of one by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Literal, Protocol

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.generation.replica import Replica
from rl_megatron.topology.fake_cuda import is_planned

CudaGraphs = Literal["auto", "off"]
_MOST_GRAPHS = 128  # each keeps its kernels' arguments on the host and the device, a few MB for a deep model


class Graph(Protocol):
    """A step that was recorded."""

    def replay(self) -> None:
        """Do what the step did, on the same tensors."""
        ...


class CudaRecorder:
    """It captures a step in a CUDA graph. All graphs share their memory, because no two run at the same time."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Graph:
        """Return the graph of a step, which is not run."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads may use the GPU meanwhile, for example to send weights.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # what the step did may have ended the capture
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


class DecodeGraphs:
    """The graphs of a decoder's steps.

    A graph reads and writes the memory that its step used. So all are dropped if a tensor that outlives the step is
    elsewhere than before. A step runs once before it is recorded: some kernels are compiled or loaded by their first
    call, which a capture does not allow.
    """

    def __init__(self, record: Callable[[Callable[[], None]], Graph], most_graphs: int = _MOST_GRAPHS):
        """Begin without graphs.

        Args:
            record: Returns the graph of a step without running it. It may raise RuntimeError; then all later steps run
                as they are.
            most_graphs: The number of graphs that are kept; the one that was not used for longest is dropped.
        """
        self._record, self._most_graphs = record, most_graphs
        self._graphs: OrderedDict[Hashable, Graph | None] = OrderedDict()  # None: it ran once
        self._addresses: tuple[int, ...] = ()
        self._failed = False

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Drop all graphs if any of the tensors that steps read or write has moved in memory."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run a step, or replay its graph.

        Args:
            key: What the step depends on, besides the tensors of `follow`.
            step: It changes nothing on the host, and does not wait for the device.
        """
        if self._failed or key not in self._graphs:
            step()
            self._graphs[key] = None
        else:
            graph = self._graphs[key] or self._recorded(step)
            self._graphs[key] = graph
            (step if graph is None else graph.replay)()
        self._graphs.move_to_end(key)
        if len(self._graphs) > self._most_graphs:
            self._graphs.popitem(last=False)

    def _recorded(self, step: Callable[[], None]) -> Graph | None:
        try:
            return self._record(step)
        except RuntimeError as error:
            self._failed = True
            log.once(f"decoding runs without CUDA graphs, because a step cannot be captured: {error}")
            return None


def graphs_for(replica: Replica, mode: CudaGraphs) -> DecodeGraphs | None:
    """Return what records the decoding steps of a replica, or None if they are not recorded.

    Args:
        replica: The model. If it cannot be captured on a GPU, the reason is logged once.
        mode: The value of `generation.cuda_graphs`.
    """
    if mode == "off" or replica.device.type != "cuda" or is_planned():
        return None
    if replica.why_not_captured is not None:
        log.once(f"decoding runs without CUDA graphs: {replica.why_not_captured}")
        return None
    return DecodeGraphs(CudaRecorder())
