"""Race training steps with the balancing loss of experts off, over each microbatch, and over the global batch:

    python benchmarks/balancing_loss.py
    torchrun --nproc-per-node 2 benchmarks/balancing_loss.py --model qwen3_30b_a3b

The three train the same model on the same batch with the loss `nll`, one step each in turn. The scope `global` needs a
forward pass before the first backward pass, so it is expected to cost a quarter to a third of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl_megatron.batching.config import Batching
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy

OFF, MICROBATCH, GLOBAL = "off", "microbatch", "global"


def models(name: str, layers: int | None) -> dict[str, ModelConfig]:
    """Return the model by the scope of its balancing loss."""
    model = load_config([f"model={name}"]).first.model
    if layers is not None:
        model = replace(model, num_layers=layers)
    balanced = replace(model, router_aux_loss=0.01)
    return {OFF: model, MICROBATCH: balanced, GLOBAL: replace(balanced, router_aux_loss_scope="global")}


def documents(vocab_size: int, rows: int, length: int) -> BatchedDataDict:
    """Return random documents of `length` tokens."""
    ids = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    whole, ones = torch.full((rows,), length), torch.ones(rows)
    return BatchedDataDict(input_ids=ids, input_lengths=whole, token_mask=torch.ones(rows, length), sample_mask=ones)


def main(arguments: list[str]) -> int:
    """Print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano_moe", help="the name of a model configuration with experts")
    parser.add_argument("--layers", type=int, help="its number of layers")
    parser.add_argument("--sequences", type=int, default=32, help="documents of a step")
    parser.add_argument("--microbatch", type=int, default=4, help="documents of a microbatch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a document")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    options = parser.parse_args(arguments)

    layout = topology.build(ParallelConfig(), start_device(), seed=0)
    vocab_size, batch = 512, documents(512, options.sequences, options.length)
    policies = {
        scope: MegatronPolicy(
            model, layout, vocab_size=vocab_size, optimizer=OptimizerConfig(lr=1e-6),
            global_batch_size=options.sequences, batching=Batching("padded", options.microbatch),
        )
        for scope, model in models(options.model, options.layers).items()
    }  # fmt: skip
    seconds: dict[str, list[float]] = {scope: [] for scope in policies}
    for step in range(options.steps + 1):
        for scope, policy in policies.items():
            began = time.perf_counter()
            policy.train(batch, NLLLoss())
            if layout.device.type == "cuda":
                torch.cuda.synchronize()
            if step:  # the first one warms up
                seconds[scope].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        medians = {scope: statistics.median(times) for scope, times in seconds.items()}
        for scope, median in medians.items():
            print(f"{scope:>10}  {median * 1e3:8.1f} ms  {median / medians[OFF]:.3f} of a step without it")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
