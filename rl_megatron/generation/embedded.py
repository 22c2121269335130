"""The embedded rollout engine: it samples from the training model itself, with the same shards and no copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rl_megatron.config.errors import ConfigError
from rl_megatron.generation.completion_batch import check_requests
from rl_megatron.generation.decode_graphs import CudaGraphs, graphs_for
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.embedded_replica import EmbeddedReplica
from rl_megatron.generation.interfaces import Completion, Request, Served
from rl_megatron.generation.ongoing import Ongoing
from rl_megatron.training.megatron_policy import MegatronPolicy


class EmbeddedEngine:
    """A `RolloutEngine` on a policy's own model chunks, under tensor and pipeline parallelism.

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
        self._ranks = policy.topology.ranks

    def sync(self) -> dict[str, float]:
        """Return no metrics: the policy's weights are the engine's, and are not sent."""
        return {}

    def close(self) -> None:
        """Do nothing: the engine started no process."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete the requests of rank 0 together; see `RolloutEngine.complete`.

        Each replica gets its requests, and rank 0 gets their completions.
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

    def _decoder(self) -> Decoder:
        replica = EmbeddedReplica(self.policy, self.records_routing)
        return Decoder(replica, self.batch_size, graphs_for(replica, self.cuda_graphs))

    def _shared_out(self, requests: Sequence[Request]) -> tuple[Sequence[Request], int]:
        """Return this replica's share of the requests that rank 0 has, and the number of all of them. Collective."""
        topology, groups = self.policy.topology, self.policy.topology.groups
        if topology.world_size == 1:
            return requests, len(requests)
        share: list[Any] = [None]
        if topology.tensor_rank == topology.pipeline_rank == 0:
            count = groups.dp_cp.size()
            shares = [(requests[replica::count], len(requests)) for replica in range(count)]
            dist.scatter_object_list(
                share, shares if self._ranks.leads else None, dist.get_global_rank(groups.dp_cp, 0), groups.dp_cp
            )
        for group, takes_part in ((groups.pp, topology.tensor_rank == 0), (groups.tp, True)):
            if takes_part and group.size() > 1:
                dist.broadcast_object_list(share, dist.get_global_rank(group, 0), group, topology.device)
        return share[0]

    def _collected(self, completions: list[Completion]) -> list[Completion]:
        """Return the completions of all replicas on rank 0, and none on other ranks. Collective."""
        topology, group = self.policy.topology, self.policy.topology.groups.dp_cp
        if topology.world_size == 1:
            return completions
        parts: list[list[Completion]] = [[] for _ in range(group.size())] if self._ranks.leads else []
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
