"""Compare a model here with the same model in transformers: `python compare.py DIRECTORY [EXPORTED]`.

The logits may differ by 1e-4, and the tensors of an exported directory not in one bit. Under torchrun the model is
tensor-parallel over all ranks.
"""

import os
import sys
from pathlib import Path

import phi3  # noqa: F401  # registers the family
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_megatron import BatchedDataDict, MegatronPolicy, ParallelConfig


def compare_logits(directory: str) -> float:
    """Return the largest difference of a logit, on random tokens; print it on rank 0."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    policy = MegatronPolicy.from_hf(directory, parallel=ParallelConfig(tensor=ranks), device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    size = theirs.config.vocab_size
    ids = torch.randint(size, (4, 48), generator=torch.Generator().manual_seed(0))
    top = policy.get_topk_logits(BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((4,), 48)}), k=size)
    ours = torch.empty_like(top["topk_logits"]).scatter_(-1, top["topk_indices"], top["topk_logits"])
    with torch.no_grad():
        difference = (ours - theirs(ids).logits).abs().max().item()
    if policy.topology.rank == 0:
        print(f"{ranks} rank(s): logits from {ours.min():.2f} to {ours.max():.2f} differ by at most {difference:.1e}")
    return difference


def same_tensors(directory: str, exported: str) -> bool:
    """Return whether both directories have the same tensors, bit for bit; print how many there are."""
    one, other = (load_file(Path(place) / "model.safetensors") for place in (directory, exported))
    same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    print(f"{len(one)} tensors, {len(other)} exported: {'the same' if same else 'not the same'}")
    return same


if __name__ == "__main__":
    equal = compare_logits(sys.argv[1]) <= 1e-4
    if len(sys.argv) > 2:
        equal = same_tensors(sys.argv[1], sys.argv[2]) and equal
    sys.exit(not equal)
