"""Completions as they grow, token by token: what every engine that samples for itself keeps of a batch of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.generation.interfaces import Sampling


def sequence_uniforms(num_sequences: int, sampling: Sampling, seed: int) -> Tensor:
    """[num_rows, max_new_tokens] fp64 in [0, 1): the number that decides each row's tokens, whichever engine draws it
    and however rows are spread."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_sequences, sampling.max_new_tokens, generator=generator, dtype=torch.float64)


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [b, width], all prompts ending in the last column, and the first real column [b] of each row."""
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    return tokens, torch.tensor([width - len(prompt) for prompt in prompts], device=device)


class Completions:
    """Tokens [b, max_new], their logprobs [b, max_new] fp32, lengths [b] and, from 1 on, the token [b] whose logits
    were NaN, 0 where none were."""

    def __init__(self, num_sequences: int, sampling: Sampling, device: torch.device):
        self.tokens = torch.zeros(num_sequences, sampling.max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(num_sequences, sampling.max_new_tokens, device=device)
        self.lengths = torch.zeros(num_sequences, dtype=torch.long, device=device)
        self.nan_at = torch.zeros(num_sequences, dtype=torch.long, device=device)
        self.running = torch.ones(num_sequences, dtype=torch.bool, device=device)
        self._stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)

    def add(self, step: int, chosen: Tensor, logprobs: Tensor) -> Tensor:
        """What was drawn in column `step`, both [b]. Returns the next tokens to feed [b, 1], 0 in rows that ended."""
        self.nan_at[self.running & logprobs.isnan()] = step + 1
        chosen = torch.where(self.running, chosen, 0)
        self.tokens[:, step] = chosen
        self.logprobs[:, step] = torch.where(self.running, logprobs, 0.0).float()
        self.lengths += self.running
        self.running = self.running & ~torch.isin(chosen, self._stops)
        return chosen[:, None]

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.logprobs, self.lengths, self.nan_at
