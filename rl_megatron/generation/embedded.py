"""The embedded rollout engine: it samples from the training model itself, with its shards and without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_megatron.config.errors import ConfigError
from rl_megatron.generation.completion_batch import check_requests
from rl_megatron.generation.decode_graphs import CudaGraphs, make_graphs
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.interfaces import Completion, Request, Sampling, Served
from rl_megatron.generation.kv_cache import KVCache, caching
from rl_megatron.generation.requests import PartialCompletion
from rl_megatron.generation.sampling import sample
from rl_megatron.model.build import unwrap
from rl_megatron.model.layers.router_replay import recording
from rl_megatron.topology.transfer import read_numbers, send
from rl_megatron.training.megatron_policy import MegatronPolicy


class EmbeddedEngine:
    """A `RolloutEngine` on a policy's own model chunks, under tensor and pipeline parallelism.

    Requests are spread over data-parallel and context-parallel ranks: generation needs no context parallelism, because
    a step reads one token of each sequence. A sequence's random numbers depend on its request's seed alone, so rollouts
    depend on the parallel layout only through floating-point rounding.
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
        """Complete the requests of rank 0 together; see `RolloutEngine.complete`."""
        self.policy.model.require_head("lm", "generate")
        longest = self.policy.model_config.max_sequence_length
        self._ranks.run_on_rank0(lambda: check_requests(requests, longest, self.policy.vocab_size), (ConfigError,))
        share, total = self._scatter(requests)
        self.policy.finish_training()
        replica = EmbeddedReplica(self.policy, self.records_routing)
        decoder = Decoder(replica, self.batch_size, make_graphs(replica, self.cuda_graphs))
        decoder.add([PartialCompletion(request) for request in share])
        # No check comes before the gather: if one rank raised an error, the others would wait for its sequences.
        completions = self._gather(self._decode(decoder, total))
        by_id = {completion.request_id: completion for completion in completions}
        return [by_id[request.request_id] for request in requests]

    def _scatter(self, requests: Sequence[Request]) -> tuple[Sequence[Request], int]:
        """Return this replica's share of rank 0's requests, and the number of all requests. Collective."""
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

    def _gather(self, completions: list[Completion]) -> list[Completion]:
        """Return the completions of all replicas on rank 0, and none on other ranks. Collective."""
        topology, group = self.policy.topology, self.policy.topology.groups.dp_cp
        if topology.world_size == 1:
            return completions
        parts: list[list[Completion]] = [[] for _ in range(group.size())] if self._ranks.leads else []
        if topology.tensor_rank == topology.pipeline_rank == 0:
            dist.gather_object(completions, parts or None, dist.get_global_rank(group, 0), group)
        return [completion for part in parts for completion in part]

    def _decode(self, decoder: Decoder, total: int) -> list[Completion]:
        """Complete all sequences that the decoder has; `total` is the number on all ranks."""
        progress = DecodingProgress(total, share=self.policy.topology.groups.dp_cp.size())
        completions: list[Completion] = []
        with decoder.active():
            while (ended := decoder.advance()) is not None:
                completions += ended
                progress.update(len(completions), decoder.sum_shares, len(decoder.running))
        progress.finish_batch(len(completions))
        return completions


class EmbeddedReplica:
    """A `Replica` on a policy's model chunks, under tensor, pipeline and expert parallelism."""

    def __init__(self, policy: MegatronPolicy, records_routing: bool = False):
        self.policy, self.topology, self.device = policy, policy.topology, policy.topology.device
        self.model_pass = ModelPass(policy)
        self.shares_experts = policy.topology.expert * policy.topology.expert_tensor > 1
        model = policy.model_config
        self._routing = (model.num_layers, model.experts_per_token) if records_routing else None
        self.cache = self.make_cache(1, 1)

    @property
    def weight_version(self) -> int:
        return self.policy.weight_version

    @property
    def why_not_captured(self) -> str | None:
        """Return why a decoding step cannot be captured in a CUDA graph, or None if it can."""
        topology, model = self.topology, self.policy.model_config
        if topology.tensor * topology.pipeline > 1:
            return "ranks that share the model exchange messages in each step"
        if model.num_experts is not None:
            return "a step of a model with experts waits for the GPU"
        if model.full_attention_every is not None:
            return "CUDA graphs have not been tried with the gated delta rule"
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the weights and the table of RoPE angles."""
        for model in self.model_pass.models:
            yield from model.parameters()
        yield self.model_pass.get_angles(self.cache.capacity)

    def make_cache(self, num_slots: int, capacity: int) -> KVCache:
        self.cache = KVCache(self.model_pass.models, num_slots, capacity, self._routing)
        return self.cache

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the model use the cache within the context."""
        models, cache = self.model_pass.models, self.cache
        records = nullcontext() if cache.experts is None else recording(models, cache.keep_experts)
        with caching(models, cache), records:
            yield

    def agree(self, refills: bool, decodes: bool) -> tuple[bool, bool]:
        """Return whether any of the ranks that share experts reads prompts, and whether any decodes."""
        if not self.shares_experts:
            return refills, decodes
        state = send(torch.tensor([refills, decodes], dtype=torch.int), self.device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self.topology.groups.tp_ep)
        refills_anywhere, decodes_anywhere = map(bool, read_numbers(state))
        return refills or refills_anywhere, decodes or decodes_anywhere

    def read(self, tokens: Tensor) -> None:
        """Write the keys and values of tokens [b, s], at the positions 0 … s − 1, to the cache."""
        self.model_pass(tokens, self.model_pass.get_angles(tokens.size(1)), wants_logits=False)

    def compute_logits(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Return this rank's logits [n, V/tp] after tokens [n] at positions [n], or None if another stage has them."""
        angles = self.model_pass.get_angles(self.cache.capacity)[positions].transpose(0, 1)
        return self.model_pass(tokens[:, None], angles, wants_logits=True)

    def gather_stages(self, experts: Tensor) -> Tensor:
        """Sum the experts over pipeline stages, each of which has zeros for other stages' layers; return int16."""
        if self.topology.pipeline > 1:
            experts = experts.int()  # gloo and NCCL cannot sum int16
            dist.all_reduce(experts, group=self.topology.groups.pp)
        return experts.short()

    def sample(self, logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        return sample(logits, uniforms, sampling, self.topology.groups.tp, self.policy.vocab_size)

    def share(self, drawn: Tensor) -> None:
        """Broadcast `drawn` from the last pipeline stage to all stages."""
        if self.topology.pipeline > 1:
            dist.broadcast(drawn, src=self.topology.last_stage_rank, group=self.topology.groups.pp)


class ModelPass:
    """The forward pass of a policy's model without its loss. It owns the table of RoPE angles.

    Every rank of a model replica calls it with the same tokens.
    """

    def __init__(self, policy: MegatronPolicy):
        self.topology = policy.topology
        self.models: list[GPTModel] = [unwrap(model_chunk) for model_chunk in policy.model.model_chunks]
        self._angles = torch.empty(0)

    def get_angles(self, num_positions: int) -> Tensor:
        """Return the RoPE angles of the first positions, [num_positions, 1, 1 or 2, D]. The table grows if needed."""
        if len(self._angles) < num_positions:
            self._angles = cast(RotaryEmbedding, self.models[0].rotary_pos_emb).get_emb(num_positions)
        return self._angles[:num_positions]

    def __call__(self, tokens: Tensor, angles: Tensor, wants_logits: bool) -> Tensor | None:
        """Compute all stages for tokens [b, s], with RoPE angles [s, 1 or b, 1 or 2, D], one stage after the other.

        Returns:
            Vocab-parallel logits [b, V/tp] after the last column, on the last stage; None on other stages. None also if
            `wants_logits` is False, as when only the caches are needed.
        """
        ranks = dist.get_process_group_ranks(self.topology.groups.pp)
        previous = ranks[(self.topology.pipeline_rank - 1) % self.topology.pipeline]
        following = ranks[(self.topology.pipeline_rank + 1) % self.topology.pipeline]
        for model in self.models:
            hidden = None
            if model.pre_process:
                hidden = model.embedding(input_ids=tokens, position_ids=None)
            else:
                parameter = next(model.parameters())
                shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
                received = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                dist.recv(received, src=previous, group=self.topology.groups.pp)
                model.set_input_tensor(received)
            hidden = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
            if model.post_process:
                return self._logits(model, hidden[-1:]) if wants_logits else None
            dist.send(hidden.contiguous(), dst=following, group=self.topology.groups.pp)
        return None

    def _logits(self, model: GPTModel, hidden: Tensor) -> Tensor:
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else None
        logits, _ = model.output_layer(hidden, weight=weight)
        return logits[0]
