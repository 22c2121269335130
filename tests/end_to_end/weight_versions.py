"""Compare what an asynchronous run has recorded of its tokens with the weights of the versions that it names."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_megatron.rollouts.files import rows_to_batch
from rl_megatron.rollouts.rows import read_rows
from rl_megatron.training.megatron_policy import MegatronPolicy


def difference_from_versions(output: Path, stage: str = "grpo") -> dict[str, float]:
    """Return how far the recorded logprobs are from those of the checkpoints of their versions.

    Version n has the weights of step n of a run with one optimizer step per step. Tokens of version 0 are left out,
    because there is no checkpoint of it.

    Returns:
        `largest`, the largest difference in nats; `of_another`, the mean difference from the version after the one that
        is named; `tokens`, how many were compared; and `mixed`, how many sequences have tokens of several versions.
    """
    files = sorted((output / "rollouts" / stage).glob("step-*.parquet"))
    batches = [rows_to_batch(read_rows(path)) for path in files]
    found = {"largest": 0.0, "of_another": 0.0, "tokens": 0, "mixed": 0}
    num_of_another = 0
    for batch in batches:
        versions = batch["token_weight_versions"]
        oldest = versions.masked_fill(versions < 0, 1 << 30).amin(1)
        found["mixed"] += int((oldest < versions.amax(1)).sum())
    for checkpoint in sorted((output / "checkpoints" / stage).glob("step-*")):
        version, policy = int(checkpoint.name.removeprefix("step-")), MegatronPolicy.from_checkpoint(checkpoint)
        for batch in batches:
            versions = batch["token_weight_versions"]
            for wanted in (version, version - 1):
                tokens = versions == wanted if wanted > 0 else torch.zeros_like(versions, dtype=torch.bool)
                if not tokens.any():
                    continue
                difference = (policy.get_logprobs(batch)["logprobs"] - batch["generation_logprobs"]).abs()[tokens]
                if wanted == version:
                    found["largest"] = max(found["largest"], difference.max().item())
                    found["tokens"] += int(tokens.sum())
                else:
                    found["of_another"] += difference.sum().item()
                    num_of_another += int(tokens.sum())
        policy.shutdown()
    found["of_another"] /= max(num_of_another, 1)
    return found
