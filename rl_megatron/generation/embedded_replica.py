"""The policy's own model as a `Replica`, for the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.kv_cache import KVCache, caching
from rl_megatron.generation.model_pass import ModelPass
from rl_megatron.generation.sampling import sample
from rl_megatron.model.layers.router_replay import recording
from rl_megatron.topology.transfer import read_numbers, send
from rl_megatron.training.megatron_policy import MegatronPolicy


class EmbeddedReplica:
    """A `Replica` on a policy's model chunks, under tensor, pipeline and expert parallelism."""

    def __init__(self, policy: MegatronPolicy, records_routing: bool = False):
        self.policy, self.topology, self.device = policy, policy.topology, policy.topology.device
        self.model_pass = ModelPass(policy)
        self.shares_experts = policy.topology.expert * policy.topology.expert_tensor > 1
        model = policy.model_config
        self._routing = (model.num_layers, model.experts_per_token) if records_routing else None
        self.cache = self.new_cache(1, 1)

    @property
    def weight_version(self) -> int:
        """Return the version of the policy's weights."""
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
            return "layers with the gated delta rule have not been tried with them"
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Return the weights and the table of RoPE angles."""
        for model in self.model_pass.models:
            yield from model.parameters()
        yield self.model_pass.angles(self.cache.capacity)

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """Return a cache of the model's layers."""
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
        """Return what any of the ranks that share experts has to do."""
        if not self.shares_experts:
            return refills, decodes
        state = send(torch.tensor([refills, decodes], dtype=torch.int), self.device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self.topology.groups.tp_ep)
        refills_anywhere, decodes_anywhere = map(bool, read_numbers(state))
        return refills or refills_anywhere, decodes or decodes_anywhere

    def read(self, tokens: Tensor) -> None:
        """Write the keys and values of tokens [b, s] to the cache; they are at the positions 0 … s − 1."""
        self.model_pass(tokens, self.model_pass.angles(tokens.size(1)), wants_logits=False)

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Return this rank's logits [n, V/tp] after tokens [n] at positions [n], or None if another stage has them."""
        angles = self.model_pass.angles(self.cache.capacity)[positions].transpose(0, 1)
        return self.model_pass(tokens[:, None], angles, wants_logits=True)

    def of_all_stages(self, experts: Tensor) -> Tensor:
        """Return the experts of all layers, int16, from those of this rank's, which are 0 in other layers."""
        if self.topology.pipeline > 1:
            experts = experts.int()  # gloo and NCCL cannot sum int16
            dist.all_reduce(experts, group=self.topology.groups.pp)
        return experts.short()

    def sample(self, logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return a token of each sequence and its logprob, [n] each."""
        return sample(logits, uniforms, sampling, self.topology.groups.tp, self.policy.vocab_size)

    def share(self, drawn: Tensor) -> None:
        """Give every pipeline stage what the last stage has in `drawn`."""
        if self.topology.pipeline > 1:
            dist.broadcast(drawn, src=self.topology.last_stage_rank, group=self.topology.groups.pp)
