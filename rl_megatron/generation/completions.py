"""Keep the completions of a batch while they grow token by token, for engines that sample for themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.generation.interfaces import Sampling


def sequence_uniforms(num_sequences: int, sampling: Sampling, seed: int) -> Tensor:
    """Return the random numbers that decide the tokens, [num_sequences, max_new_tokens] fp64 in [0, 1).

    They depend on the seed and the shape alone, not on the engine or on how sequences are spread over ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_sequences, sampling.max_new_tokens, generator=generator, dtype=torch.float64)


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids [b, width] of prompts that all end in the last column, and each prompt's first column [b]."""
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    return tokens, torch.tensor([width - len(prompt) for prompt in prompts], device=device)


class Completions:
    """The completions of a batch of b sequences.

    Attributes:
        tokens: Token ids, [b, max_new_tokens].
        logprobs: Logprobs of the tokens, [b, max_new_tokens] fp32.
        lengths: Tokens so far, [b].
        nan_at: The number of the token, counted from 1, whose logits were NaN; 0 if none were. [b]
        running: Whether the sequence goes on, [b].
    """

    def __init__(self, num_sequences: int, sampling: Sampling, device: torch.device):
        self.tokens = torch.zeros(num_sequences, sampling.max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(num_sequences, sampling.max_new_tokens, device=device)
        self.lengths = torch.zeros(num_sequences, dtype=torch.long, device=device)
        self.nan_at = torch.zeros(num_sequences, dtype=torch.long, device=device)
        self.running = torch.ones(num_sequences, dtype=torch.bool, device=device)
        self._stop_strings = sampling.stop_strings
        self._stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)

    def add(self, step: int, chosen: Tensor, logprobs: Tensor) -> Tensor:
        """Append one token to every running sequence.

        Args:
            step: The column.
            chosen: The sampled token ids, [b].
            logprobs: Their logprobs, [b].

        Returns:
            The next tokens to feed, [b, 1]; 0 for sequences that have ended.
        """
        self.nan_at[self.running & logprobs.isnan()] = step + 1
        chosen = torch.where(self.running, chosen, 0)
        self.tokens[:, step] = chosen
        self.logprobs[:, step] = torch.where(self.running, logprobs, 0.0).float()
        self.lengths += self.running
        self.running = self.running & ~torch.isin(chosen, self._stops)
        if self._stop_strings is not None:
            self.running = self.running & ~self._stop_strings.ended(self.tokens[:, : step + 1], self.running)
        return chosen[:, None]

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, logprobs, lengths and nan_at."""
        return self.tokens, self.logprobs, self.lengths, self.nan_at
