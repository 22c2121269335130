"""A plain function as a loss of the Python API: `python plain_function.py`, alone or under torchrun."""

import torch
from advantage_weighted import AdvantageWeightedLoss

from rl_megatron import (
    EmbeddedEngine,
    MegatronPolicy,
    ModelConfig,
    OptimizerConfig,
    Reduction,
    Sampling,
    generate,
    masked_mean,
    start_topology,
)


def weighted_nll(data, global_valid_seqs, global_valid_toks, next_token_logprobs):
    """Return −Σ m·e^A·log π / N_tokens and its metrics, from logprobs [B, S-1]."""
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    weights = data["advantages"][:, 1:].exp()
    loss = -masked_mean(weights * next_token_logprobs, mask, global_normalization_factor=global_valid_toks)
    weight = masked_mean(weights, mask, global_normalization_factor=global_valid_toks)
    return loss, {"loss": loss.detach(), "weight": weight}


weighted_nll.metric_reductions = Reduction.table("loss", "weight")


def main() -> None:
    model = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=192)
    topology = start_topology(device="cpu")
    policy = MegatronPolicy(model, topology, vocab_size=260, optimizer=OptimizerConfig(lr=1e-3))
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12], [13]]
    rollouts = generate(EmbeddedEngine(policy), prompts, Sampling(max_new_tokens=6), seed=0)
    torch.manual_seed(0)
    rollouts["advantages"] = torch.randn(len(prompts), 1) * rollouts["token_mask"]

    for name, loss_fn in {"class": AdvantageWeightedLoss(), "function": weighted_nll}.items():
        report = policy.train(rollouts, loss_fn, eval_mode=True)
        if topology.rank == 0:
            print(f"{name}: loss {report['loss']:.6f}, mean weight {report['weight']:.6f}")
    first, *_, last = (policy.train(rollouts, weighted_nll)["loss"] for _ in range(10))
    if topology.rank == 0:
        print(f"loss of the first and the tenth step: {first:.4f}, {last:.4f}")


if __name__ == "__main__":
    main()
