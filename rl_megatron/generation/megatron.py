"""The embedded rollout engine: samples from the training model itself, sharded as it is. No copy of the weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.kv_cache import Columns, caching
from rl_megatron.generation.sampling import sample
from rl_megatron.model.build import unwrap
from rl_megatron.policy.megatron_policy import MegatronPolicy
from rl_megatron.schedule import NonFiniteLoss


class MegatronEngine:
    """A `RolloutEngine` on a policy's own chunks, under tensor and pipeline parallelism.

    Prompts are spread over data- and context-parallel ranks (generation needs no context parallelism: a column is one
    token). The random number of a row and step depends on the seed and on `max_new_tokens` alone, so rollouts do not
    depend on the layout beyond floating-point rounding.
    """

    def __init__(self, policy: MegatronPolicy, batch_size: int = 256):
        self.policy, self.batch_size = policy, batch_size

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """See `RolloutEngine.generate`.

        Raises, on every rank: ConfigError where a prompt leaves no room for `max_new_tokens`; NonFiniteLoss where any
        rank's logits are NaN or infinite.
        """
        self.policy.require_head("lm", "generate")
        topology = self.policy.topology
        device, group = topology.platform.device, topology.groups.dp_cp
        longest = max(len(prompt) for prompt in prompts)
        self._check(prompts, longest, sampling)
        uniforms = torch.rand(
            len(prompts), sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).to(device)

        per_rank = -(-len(prompts) // group.size())
        mine = [min(i, len(prompts) - 1) for i in range(group.rank() * per_rank, (group.rank() + 1) * per_rank)]
        completions = torch.zeros(per_rank, sampling.max_new_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(per_rank, sampling.max_new_tokens, dtype=torch.float32, device=device)
        lengths = torch.zeros(per_rank, dtype=torch.long, device=device)
        nan_at = torch.zeros(per_rank, dtype=torch.long, device=device)
        self.policy.finish_training()
        for start in range(0, per_rank, self.batch_size):
            rows = slice(start, min(start + self.batch_size, per_rank))
            batch = mine[rows]
            completions[rows], logprobs[rows], lengths[rows], nan_at[rows] = self._decode(
                [prompts[i] for i in batch], uniforms[batch], sampling
            )
        nan_at = _gather_rows(nan_at, group)
        if nan_at.any():  # only here: an error on one rank alone would leave the others waiting for its rows
            first = nan_at[nan_at > 0].min().item()
            raise NonFiniteLoss(f"the model's logits are NaN or infinite at token {first} of a completion")
        completions, logprobs, lengths = (
            _gather_rows(x, group)[: len(prompts)] for x in (completions, logprobs, lengths)
        )
        return _rollouts(prompts, completions, logprobs, lengths, sampling)

    def _check(self, prompts: list[list[int]], longest: int, sampling: Sampling) -> None:
        limit = self.policy.model_config.max_sequence_length
        if not all(prompts):
            raise ConfigError("a prompt is empty; every prompt needs at least one token")
        if longest + sampling.max_new_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and generation.max_new_tokens={sampling.max_new_tokens} exceed "
                f"model.max_sequence_length={limit}; lower max_new_tokens or raise the limit"
            )

    def _decode(
        self, prompts: list[list[int]], uniforms: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Completions [b, max_new], their logprobs [b, max_new], lengths [b], and from 1 on the token [b] whose logits
        are NaN, 0 where none are, on every rank of the model. Decoding ends at a NaN."""
        topology = self.policy.topology
        device, num_rows = topology.platform.device, len(prompts)
        models = [unwrap(chunk) for chunk in self.policy.chunks]
        width = max(len(prompt) for prompt in prompts)
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        first = torch.tensor([width - len(p) for p in prompts], device=device)
        stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)

        completions = torch.zeros(num_rows, sampling.max_new_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(num_rows, sampling.max_new_tokens, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        nan_at = torch.zeros(num_rows, dtype=torch.long, device=device)
        running = torch.ones(num_rows, dtype=torch.bool, device=device)
        columns = Columns(first, capacity=width + sampling.max_new_tokens)
        with caching(models, columns):
            for step in range(sampling.max_new_tokens):
                logits = self._forward(models, tokens, columns)
                columns.filled += tokens.size(1)
                drawn = torch.zeros(2, num_rows, dtype=torch.float64, device=device)
                if logits is not None:
                    chosen, logprob = sample(
                        logits, uniforms[:, step], sampling, topology.groups.tp, self.policy.vocab_size
                    )
                    drawn[0], drawn[1] = chosen.double(), logprob.double()  # ids are exact in fp64
                if topology.pipeline > 1:
                    dist.broadcast(drawn, src=topology.last_stage_rank, group=topology.groups.pp)
                nan = running & drawn[1].isnan()
                nan_at[nan] = step + 1
                chosen = torch.where(running, drawn[0].long(), 0)
                completions[:, step] = chosen
                logprobs[:, step] = torch.where(running, drawn[1], 0.0).float()
                lengths += running
                running = running & ~torch.isin(chosen, stops)
                if not self._goes_on(running, nan):
                    break
                tokens = chosen[:, None]
        return completions, logprobs, lengths, nan_at

    def _goes_on(self, running: Tensor, nan: Tensor) -> bool:
        """While any row runs and none is NaN, on all the ranks whose experts the rows of others visit."""
        state = torch.stack([running.any(), nan.any()]).int()
        if self.policy.topology.expert > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self.policy.topology.groups.ep)
        any_runs, any_nan = state.tolist()
        return bool(any_runs and not any_nan)

    def _forward(self, models: list[GPTModel], tokens: Tensor, columns: Columns) -> Tensor | None:
        """Vocab-parallel logits [b, V/tp] after the newest column, on the last stage; None on other stages.

        Stages run one after the other, model chunk by model chunk, handing hidden states on.
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
            rotary = model.rotary_pos_emb.get_emb(stop)[start:stop]
            hidden = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
            if model.post_process:
                shared = model.share_embeddings_and_output_weights
                weight = model.shared_embedding_or_output_weight() if shared else None
                logits, _ = model.output_layer(hidden[-1:], weight=weight)
                return logits[0]
            dist.send(hidden.contiguous(), dst=after, group=topology.groups.pp)
        return None


def _gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


def _rollouts(
    prompts: list[list[int]], completions: Tensor, logprobs: Tensor, lengths: Tensor, sampling: Sampling
) -> BatchedDataDict:
    completions, logprobs, lengths = completions.cpu(), logprobs.cpu(), lengths.cpu()
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int((prompt_lengths + lengths).max())
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    token_mask = torch.zeros(len(prompts), width)
    generation_logprobs = torch.zeros(len(prompts), width)
    for row, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        end = len(prompt) + length
        input_ids[row, : len(prompt)] = torch.tensor(prompt)
        input_ids[row, len(prompt) : end] = completions[row, :length]
        token_mask[row, len(prompt) : end] = 1.0
        generation_logprobs[row, len(prompt) : end] = logprobs[row, :length]
    last = completions.gather(1, (lengths - 1)[:, None])[:, 0]
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": prompt_lengths + lengths,
            "prompt_lengths": prompt_lengths,
            "token_mask": token_mask,
            "sample_mask": torch.ones(len(prompts)),
            "generation_logprobs": generation_logprobs,
            "temperature": torch.full((len(prompts),), sampling.temperature or 1.0),
            "stopped": torch.isin(last, torch.tensor(sampling.stop_ids, dtype=torch.long)),
        }
    )
