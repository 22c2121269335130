"""The embedded rollout engine: it samples from the training model itself, with the same shards and no copy."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.completion_batch import check_prompts, rollouts
from rl_megatron.generation.completions import Completions, left_padded, sequence_uniforms
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.interfaces import Sampling, Served
from rl_megatron.generation.kv_cache import Columns, caching
from rl_megatron.generation.sampling import sample
from rl_megatron.model.build import unwrap
from rl_megatron.policy.megatron_policy import MegatronPolicy


class EmbeddedEngine:
    """A `RolloutEngine` on a policy's own model chunks, under tensor and pipeline parallelism.

    Prompts are spread over data- and context-parallel ranks: generation needs no context parallelism, because a column
    is one token. The random number of a sequence and step depends on the seed and on `max_new_tokens` alone, so
    rollouts do not depend on the parallel layout beyond floating-point rounding.
    """

    served = Served(version=None)

    def __init__(self, policy: MegatronPolicy, batch_size: int = 256):
        self.policy, self.batch_size = policy, batch_size

    def update_weights(self) -> dict[str, float]:
        """Return no metrics: the policy's weights are the engine's, and are not sent."""
        return {}

    def shutdown(self) -> None:
        """Do nothing: the engine started no process."""

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """Generate one completion for each prompt; see `RolloutEngine.generate`.

        Raises:
            ConfigError: On every rank, if a prompt is too long for `max_new_tokens`.
            NonFiniteLoss: On every rank, if the logits of any rank are NaN or infinite.
        """
        self.policy.model.require_head("lm", "generate")
        topology = self.policy.topology
        device, group = topology.device, topology.groups.dp_cp
        check_prompts(prompts, sampling, self.policy.model_config.max_sequence_length)
        uniforms = sequence_uniforms(len(prompts), sampling, seed).to(device)
        per_rank = -(-len(prompts) // group.size())
        mine = [min(i, len(prompts) - 1) for i in range(group.rank() * per_rank, (group.rank() + 1) * per_rank)]
        self.policy.finish_training()
        batches = [mine[start : start + self.batch_size] for start in range(0, per_rank, self.batch_size)]
        progress = DecodingProgress(len(prompts), share=group.size())
        decoded = [
            self._decode([prompts[i] for i in indices], uniforms[indices], sampling, progress).parts()
            for indices in batches
        ]
        # Gather before any check: an error on one rank alone would leave the others waiting for its sequences.
        parts = tuple(_gather_sequences(torch.cat(part), group)[: len(prompts)] for part in zip(*decoded, strict=True))
        return rollouts(prompts, parts, sampling, self.policy.weight_version)

    def _decode(
        self, prompts: list[list[int]], uniforms: Tensor, sampling: Sampling, progress: DecodingProgress
    ) -> Completions:
        """Return the completions of a batch of prompts, on every rank of the model. Decoding ends at a NaN."""
        topology = self.policy.topology
        device, num_sequences = topology.device, len(prompts)
        models = [unwrap(model_chunk) for model_chunk in self.policy.model.model_chunks]
        tokens, first = left_padded(prompts, device)
        completions = Completions(num_sequences, sampling, device)
        columns = Columns(first, capacity=tokens.size(1) + sampling.max_new_tokens)
        with caching(models, columns):
            for step in range(sampling.max_new_tokens):
                logits = self._forward(models, tokens, columns)
                columns.filled += tokens.size(1)
                drawn = torch.zeros(2, num_sequences, dtype=torch.float64, device=device)
                if logits is not None:
                    chosen, logprob = sample(
                        logits, uniforms[:, step], sampling, topology.groups.tp, self.policy.vocab_size
                    )
                    drawn[0], drawn[1] = chosen.double(), logprob.double()  # ids are exact in fp64
                if topology.pipeline > 1:
                    dist.broadcast(drawn, src=topology.last_stage_rank, group=topology.groups.pp)
                tokens = completions.add(step, drawn[0].long(), drawn[1])
                progress.token_added(step + 1, sampling.max_new_tokens, completions.running)
                if not self._goes_on(completions.running, completions.nan_at > 0):
                    break
        progress.batch_ended(num_sequences)
        return completions

    def _goes_on(self, running: Tensor, nan: Tensor) -> bool:
        """Return whether any sequence still runs and none is NaN.

        All ranks of an expert-parallel group get the same answer, because they compute each other's tokens.
        """
        state = torch.stack([running.any(), nan.any()]).int()
        if self.policy.topology.expert > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self.policy.topology.groups.ep)
        any_runs, any_nan = state.tolist()
        return bool(any_runs and not any_nan)

    def _forward(self, models: list[GPTModel], tokens: Tensor, columns: Columns) -> Tensor | None:
        """Return vocab-parallel logits [b, V/tp] after the newest column on the last stage, None on other stages.

        Pipeline stages run one after the other, one model chunk at a time, and send hidden states to the next.
        """
        topology = self.policy.topology
        ranks = dist.get_process_group_ranks(topology.groups.pp)
        before = ranks[(topology.pipeline_rank - 1) % topology.pipeline]
        after = ranks[(topology.pipeline_rank + 1) % topology.pipeline]
        start, stop = columns.filled, columns.filled + tokens.size(1)
        for model in models:
            hidden = None
            if model.pre_process:
                hidden = model.embedding(input_ids=tokens, position_ids=None)
            else:
                parameter = next(model.parameters())
                shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
                received = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                dist.recv(received, src=before, group=topology.groups.pp)
                model.set_input_tensor(received)
            rotary = cast(RotaryEmbedding, model.rotary_pos_emb).get_emb(stop)[start:stop]
            hidden = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
            if model.post_process:
                shared = model.share_embeddings_and_output_weights
                weight = model.shared_embedding_or_output_weight() if shared else None
                logits, _ = model.output_layer(hidden[-1:], weight=weight)
                return logits[0]
            dist.send(hidden.contiguous(), dst=after, group=topology.groups.pp)
        return None


def _gather_sequences(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


MegatronEngine = EmbeddedEngine  # the older name, which scripts import
