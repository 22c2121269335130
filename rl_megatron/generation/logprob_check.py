"""The logprob check: compare an engine's logprobs with the trainer's for the same tokens, before training on them.

A failed weight sync, a wrongly converted model, or a kernel with different rounding makes the two differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_megatron.config.errors import RunFailed
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.policy.interfaces import PolicyInterface

# In nats: well above the effect of rounding, and below the effect of a wrong weight. They limit the mean, which
# is reliable even over few tokens: in bf16 about one token in a thousand differs by half a nat, but means stay below
# 0.03.
LIMITS = {"fp32": 1e-4, "bf16": 0.1}
_MAX_TOKENS = 16  # the most tokens of a completion
_SEED = 0x6A7E
_SHOWN = 3


class EngineMismatch(RunFailed):
    """The error for an engine that samples from a different distribution than the trainer's policy."""


@dataclass(frozen=True)
class LogprobCheck:
    """The comparison of an engine's logprobs with the trainer's. It has no state."""

    policy: PolicyInterface
    tokenizer: Tokenizer  # for messages
    sampling: Sampling  # the run's settings; the check lowers `max_new_tokens`
    num_prompts: int  # the number of prompts that the check completes; 0 turns it off
    limit: float  # the largest accepted mean of |trainer's − engine's logprob|, in nats

    @property
    def max_new_tokens(self) -> int:
        return min(self.sampling.max_new_tokens, _MAX_TOKENS)

    def choose(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Choose the prompts to complete: the first `num_prompts` different ones."""
        return [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))][: self.num_prompts]

    def run(self, engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Complete the first `num_prompts` different prompts, and compare the logprobs of the sampled tokens.

        Returns:
            `gate_mean`, `gate_p99` and `gate_max` of |trainer's − engine's logprob|; empty if the check is off.

        Raises:
            EngineMismatch: The mean exceeds the limit. It is raised on every rank, and names the worst tokens.
        """
        chosen = self.choose(prompts)
        if not chosen:
            return {}
        sampling = replace(self.sampling, max_new_tokens=self.max_new_tokens)
        rollouts = generate(engine, chosen, sampling, _SEED)
        trainers = self.policy.get_logprobs(rollouts)["logprobs"]
        difference = (trainers - rollouts["generation_logprobs"]).abs()
        difference = difference.nan_to_num(nan=torch.inf).masked_fill(rollouts["token_mask"] == 0, -1.0)
        values = difference[difference >= 0].double()
        figures = {
            "gate_mean": values.mean().item(),
            "gate_p99": values.quantile(0.99, interpolation="higher").item(),
            "gate_max": values.max().item(),
        }
        if not figures["gate_mean"] <= self.limit:
            raise EngineMismatch(
                f"the rollout engine's logprobs differ from the trainer's: by {figures['gate_mean']:.3g} nats on "
                f"average (generation.gate_limit={self.limit:g}), {figures['gate_p99']:.3g} at the 99th percentile "
                f"and {figures['gate_max']:.3g} at most, over {len(values)} tokens; worst: "
                + "; ".join(self._describe_worst(rollouts, trainers, difference))
            )
        return figures

    def _describe_worst(self, rollouts: BatchedDataDict, trainers: Tensor, difference: Tensor) -> list[str]:
        """Describe the sequences with the largest differences, each by its worst token."""
        largest, positions = difference.max(dim=1)
        described = []
        for sequence in largest.argsort(descending=True)[:_SHOWN].tolist():
            position, start = int(positions[sequence]), int(rollouts["prompt_lengths"][sequence])
            ids = rollouts["input_ids"][sequence]
            described.append(
                f"prompt {self.tokenizer.decode(ids[:start].tolist())!r} (sequence {sequence}), token "
                f"{position - start + 1} {self.tokenizer.decode(ids[position : position + 1].tolist())!r}: trainer "
                f"{trainers[sequence, position]:.4f}, engine {rollouts['generation_logprobs'][sequence, position]:.4f}"
            )
        return described
