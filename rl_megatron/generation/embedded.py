"""The embedded rollout engine: it samples from the training model itself, with the same shards and no copy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.completion_batch import check_requests, rollouts
from rl_megatron.generation.completions import requests_of, seed_of_id
from rl_megatron.generation.decode_graphs import CudaGraphs, graphs_for
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.embedded_replica import EmbeddedReplica
from rl_megatron.generation.interfaces import Completion, Request, Sampling, Served
from rl_megatron.generation.ongoing import Ongoing
from rl_megatron.generation.request_queue import RequestQueue
from rl_megatron.training.megatron_policy import MegatronPolicy

_T = TypeVar("_T")
_STEPS_BETWEEN_ORDERS = 8  # because ranks exchange messages for each
_WAIT_SECONDS = 10.0  # how long rank 0 waits for requests before it tells the other ranks that there are none


class EmbeddedEngine:
    """A `RequestEngine` on a policy's own model chunks, under tensor and pipeline parallelism.

    Requests are spread over data- and context-parallel ranks: generation needs no context parallelism, because a step
    reads one token of each sequence. A sequence's random numbers depend on its request's seed alone, so rollouts do not
    depend on the parallel layout beyond floating-point rounding.
    """

    served = Served(version=None)

    def __init__(
        self,
        policy: MegatronPolicy,
        batch_size: int = 256,
        records_routing: bool = False,
        cuda_graphs: CudaGraphs = "auto",
    ):
        self.policy, self.batch_size, self.records_routing = policy, batch_size, records_routing
        self.cuda_graphs: CudaGraphs = cuda_graphs
        self._leads = policy.topology.rank == 0
        self._requests = RequestQueue(policy.topology.groups.dp_cp.size())
        topology = policy.topology
        self._ranks = topology.ranks

    def update_weights(self) -> dict[str, float]:
        """Return no metrics: the policy's weights are the engine's, and are not sent."""
        return {}

    def shutdown(self) -> None:
        """Do nothing: the engine started no process."""

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """Generate one completion for each prompt; see `RolloutEngine.generate`.

        Raises:
            ConfigError: On every rank, if a prompt is too long for `max_new_tokens`.
            NonFiniteLoss: On every rank, if the logits of any rank are NaN or infinite.
        """
        requests = requests_of(prompts, sampling, seed)
        return rollouts(prompts, self.complete_all(requests), sampling)

    def complete_all(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete the requests together; see `CompletesRequests.complete_all`.

        Raises:
            ConfigError: On every rank, if a prompt is too long for `max_new_tokens`.
        """
        completions = self.complete_on_rank_0(requests if self._leads else ())
        return self._ranks.share(lambda: completions)

    def complete_on_rank_0(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete the requests of rank 0 together; see `CompletesOnRank0.complete_on_rank_0`.

        Each replica gets its requests, and rank 0 gets their completions.

        Raises:
            ConfigError: On every rank, if a prompt is too long for `max_new_tokens`.
        """
        self.policy.model.require_head("lm", "generate")
        longest = self.policy.model_config.max_sequence_length
        self._ranks.run_on_rank0(lambda: check_requests(requests, longest, self.policy.vocab_size), (ConfigError,))
        own, total = self._shared_out(requests)
        self.policy.finish_training()
        decoder = self._decoder()
        decoder.add([Ongoing(request) for request in own])
        # Gather before any check: an error on one rank alone would leave the others waiting for its sequences.
        found = self._collected(self._until_idle(decoder, total))
        by_id = {completion.request_id: completion for completion in found}
        return [by_id[request.request_id] for request in requests]

    # --- requests ---

    async def complete(
        self, ids: list[int], sampling: Sampling, request_id: str, *, seed: int | None = None
    ) -> Completion:
        """Complete one prompt while all ranks are in `decode_pending`; see `RequestEngine.complete`.

        It may be called on any asyncio loop of rank 0, in any thread.

        Raises:
            ConfigError: The prompt is too long for `max_new_tokens`.
            RuntimeError: This is not rank 0.
            ValueError: Another request that has no completion yet has this id.
        """
        if self.policy.topology.rank != 0:
            raise RuntimeError(f"request {request_id}: only the policy's rank 0 takes requests")
        request = Request(request_id, tuple(ids), sampling, seed_of_id(request_id) if seed is None else seed)
        check_requests([request], self.policy.model_config.max_sequence_length, self.policy.vocab_size)
        future = self._requests.put(request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._requests.abort([request_id])
            raise

    def pause(self, abort: bool = False) -> None:
        """Let `decode_pending` return on every rank; see `RequestEngine.pause`.

        Requests that have begun keep their tokens. Their keys and values are computed again, with the weights that the
        policy has then, when `decode_pending` is called after `resume`.
        """
        self._requests.pause(abort)

    def resume(self) -> None:
        """Let `decode_pending` generate again."""
        self._requests.resume()

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests now, with the tokens that they have; see `RequestEngine.abort`."""
        self._requests.abort(request_ids)

    def decode_pending(self, until: Future | None = None) -> None:
        """Answer the requests of `complete`, also those that arrive meanwhile. Every rank calls it.

        It returns when the engine is paused, or when no request is left. Call it in the main thread: torch computes
        with OpenMP there, and a second thread's OpenMP threads would compete with the main thread's for the cores.

        Args:
            until: On rank 0, a future before whose end the engine waits for more requests instead of returning, for
                example that of the coroutine which makes them. It is not used on other ranks.
        """
        self.policy.model.require_head("lm", "generate")
        self.policy.finish_training()
        if until is not None and self._leads:
            until.add_done_callback(self._requests.notify)
        try:
            self._serve(self._decoder(), until)
        except Exception as error:
            self._requests.fail(error)
            raise

    def _decoder(self) -> Decoder:
        replica = EmbeddedReplica(self.policy, self.records_routing)
        return Decoder(replica, self.batch_size, graphs_for(replica, self.cuda_graphs))

    def _serve(self, decoder: Decoder, until: Future | None) -> None:
        group = self.policy.topology.groups.dp_cp
        alone = self.policy.topology.world_size == 1
        ends = False
        with decoder.active():
            while not ends:
                orders = self._ranks.share(lambda: self._requests.orders(until, _WAIT_SECONDS))
                ends = orders.ends
                ended = decoder.abort(orders.aborted)
                decoder.add([sequence for replica, sequence in orders.added if replica == group.rank()])
                more, unfinished = decoder.evict() if ends else ([], [])
                ended += more
                for _ in range(0 if ends else 1 if alone else _STEPS_BETWEEN_ORDERS):
                    if (more := decoder.advance()) is None:
                        break
                    ended += more
                everywhere = _gathered([(ended, unfinished)], group)
                if self._leads:
                    for of_rank in everywhere:
                        self._requests.settle(*of_rank)

    # --- batches ---

    def _shared_out(self, requests: Sequence[Request]) -> tuple[Sequence[Request], int]:
        """Return this replica's share of the requests that rank 0 has, and the number of all of them. Collective."""
        topology, groups = self.policy.topology, self.policy.topology.groups
        if topology.world_size == 1:
            return requests, len(requests)
        share: list[Any] = [None]
        if topology.tensor_rank == topology.pipeline_rank == 0:
            replicas = groups.dp_cp.size()
            shares = [(requests[place::replicas], len(requests)) for place in range(replicas)] if self._leads else None
            dist.scatter_object_list(share, shares, dist.get_global_rank(groups.dp_cp, 0), groups.dp_cp)
        for group, takes_part in ((groups.pp, topology.tensor_rank == 0), (groups.tp, True)):
            if takes_part and group.size() > 1:
                dist.broadcast_object_list(share, dist.get_global_rank(group, 0), group, topology.device)
        return share[0]

    def _collected(self, completions: list[Completion]) -> list[Completion]:
        """Return the completions of all replicas on rank 0, and none on other ranks. Collective."""
        topology, group = self.policy.topology, self.policy.topology.groups.dp_cp
        if topology.world_size == 1:
            return completions
        parts: list[list[Completion]] = [[] for _ in range(group.size())] if self._leads else []
        if topology.tensor_rank == topology.pipeline_rank == 0:
            dist.gather_object(completions, parts or None, dist.get_global_rank(group, 0), group)
        return [completion for part in parts for completion in part]

    def _until_idle(self, decoder: Decoder, total: int) -> list[Completion]:
        """Return the completions of all sequences that the decoder has; `total` is the number on all ranks."""
        progress = DecodingProgress(total, share=self.policy.topology.groups.dp_cp.size())
        completions: list[Completion] = []
        with decoder.active():
            while (ended := decoder.advance()) is not None:
                completions += ended
                progress.advanced(len(completions), decoder.share_generated, len(decoder.running))
        progress.batch_ended(len(completions))
        return completions


def _gathered(values: list[_T], group: dist.ProcessGroup) -> list[_T]:
    """Return the values of all ranks of the group."""
    if group.size() == 1:
        return values
    parts: list[list[_T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(parts, values, group=group)
    return [value for part in parts for value in part]
