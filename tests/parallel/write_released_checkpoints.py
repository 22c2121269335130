"""Write the checkpoints that a release leaves to later ones: `python -m tests.parallel.write_released_checkpoints`.

Run it once per release, with the version in `rl_megatron/__init__.py` set. Each archive has a small checkpoint of step
2 and `continued.json`: the norms of the gradients of the two steps that follow.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rl_megatron import __version__
from rl_megatron.losses import NLLLoss
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.layouts import MODEL, OPTIMIZER, build_policy
from tests.parallel.test_layouts import random_batch
from tests.worker_pool import WorkerPool

RELEASED = Path(__file__).parent / "released_checkpoints"
CONTINUED = "continued.json"
TINY = replace(
    MODEL, num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=2, qk_norm=False, qkv_bias=False
)
CASES = {
    "fp32": (TINY, {}),
    "bf16_experts": (
        replace(TINY, num_experts=2, expert_ffn_hidden_size=8),
        {"tensor": 2, "sequence": True, "expert": 2},
    ),
}
WORLD_SIZE = 2


def build(name: str, distributed: bool = True, seed: int = 1) -> MegatronPolicy:
    model, parallel = CASES[name]
    optimizer = replace(OPTIMIZER, distributed=distributed)
    return build_policy(parallel, model=model, optimizer=optimizer, precision=name.partition("_")[0], seed=seed)


def train(policy: MegatronPolicy, seeds: range) -> list[float]:
    return [policy.train(random_batch(8, 16, seed), NLLLoss(), gbs=8)["grad_norm"] for seed in seeds]


def save(name: str, directory: str) -> list[float]:
    """Save the checkpoint of step 2, and return the norms of the gradients of the next two steps."""
    policy = build(name)
    train(policy, range(2))
    policy.save_checkpoint(directory, 2)
    return train(policy, range(2, 4))


def main() -> None:
    archives = {name: RELEASED / f"{__version__}_{name}.tar.xz" for name in CASES}
    if existing := [path for path in archives.values() if path.exists()]:
        raise SystemExit(f"{existing[0]} exists; the checkpoints of a release are not replaced")
    with closing(WorkerPool()) as pool:
        for name, archive in archives.items():
            with tempfile.TemporaryDirectory() as directory:
                norms = pool.run(WORLD_SIZE, save, name, directory)[0]
                (Path(directory) / CONTINUED).write_text(json.dumps(norms))
                with tarfile.open(archive, "x:xz", preset=9) as file:
                    file.add(directory, ".")


if __name__ == "__main__":
    main()
