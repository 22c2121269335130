"""A training script as a user of NeMo RL writes it, in the style of both its generations: losses that take logits, in
the first place, and losses that take log-probabilities, by name. It knows nothing of what answers for `nemo_rl`.

Prints one JSON object per training: its name, the losses of its steps, the metrics of the first and of the last.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from nemo_rl.algorithms.interfaces import LossFunction, LossType
from nemo_rl.algorithms.loss import (
    DistillationLossFn,
    MseValueLossConfig,
    MseValueLossFn,
    NLLLossFn,
    PreferenceLossFn,
    SequencePackingFusionLossWrapper,
    prepare_loss_input,
    prepare_packed_loss_input,
)
from nemo_rl.algorithms.loss.interfaces import LossInputType
from nemo_rl.algorithms.loss_functions import (
    ClippedPGLossConfig,
    ClippedPGLossDataDict,
    ClippedPGLossFn,
    DPOLossDataDict,
    DPOLossFn,
    NLLLoss,
    PreferenceLoss,
    SequencePackingLossWrapper,
)
from nemo_rl.algorithms.utils import calculate_kl, masked_mean
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

VOCAB, WIDTH, STEPS = 11, 16, 6
LENGTHS = torch.tensor([7, 4, 8, 6, 5, 8])
ROWS, LENGTH = len(LENGTHS), 8

# As in the recipes: a `loss_fn` section, and a `dpo` section in which the loss's keys lie among the trainer's.
LOSS_FN: ClippedPGLossConfig = {
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_ratio": None,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
}
DPO = {
    "max_num_epochs": 1,
    "max_num_steps": 150,
    "val_period": 25,
    "val_batches": 8,
    "val_global_batch_size": 8,
    "val_micro_batch_size": 1,
    "val_at_start": True,
    "val_at_end": False,
    "seed": 42,
    "reference_policy_kl_penalty": 0.5,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
    "preference_loss_weight": 1,
    "sft_loss_weight": 0.1,
}


class OwnLoss(LossFunction):
    """A user's own loss on NeMo RL's interface."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        loss = -masked_mean(next_token_logprobs, mask, global_normalization_factor=global_valid_toks)
        return loss, {"loss": loss.item()}


def make_model(outputs: int = VOCAB) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, outputs))


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    position = torch.arange(LENGTH)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=generator),
            "input_lengths": LENGTHS,
            "token_mask": ((position >= 2) & (position < LENGTHS[:, None])).float(),
            "sample_mask": torch.ones(ROWS),
        }
    )


def token_logprobs(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """[B, S], aligned with input_ids; 0 for the first token."""
    logprobs = model(input_ids).log_softmax(-1)[:, :-1]
    logprobs = logprobs.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(logprobs, (1, 0))


def make_rollouts() -> BatchedDataDict[ClippedPGLossDataDict]:
    data = make_batch()
    with torch.no_grad():
        logprobs = token_logprobs(make_model(), data["input_ids"])
    data["prev_logprobs"] = data["generation_logprobs"] = data["reference_policy_logprobs"] = logprobs
    rewards = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -1.0])
    data["advantages"] = rewards.unsqueeze(-1).expand(ROWS, LENGTH)
    return data


def make_preferences() -> BatchedDataDict[DPOLossDataDict]:
    """Chosen in rows 0, 2, 4, rejected in rows 1, 3, 5; reference logprobs beside the token before."""
    data = make_batch()
    with torch.no_grad():
        reference = token_logprobs(make_model(), data["input_ids"])
    data["reference_policy_logprobs"] = torch.roll(reference, -1, dims=-1)
    return data


def train(name: str, model: torch.nn.Module, data: Any, loss_of: Callable[..., tuple[torch.Tensor, dict]]) -> None:
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    counts = {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": mask[:, 1:].sum()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, metrics = [], []
    for _ in range(STEPS):
        loss, reported = loss_of(model, data, **counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        metrics.append(reported)
    print(json.dumps({"name": name, "losses": losses, "first": metrics[0], "last": metrics[-1]}))


def from_logits(loss_fn: LossFunction) -> Callable[..., tuple[torch.Tensor, dict]]:
    def loss_of(model, data, global_valid_seqs, global_valid_toks):
        logits = model(data["input_ids"])
        return loss_fn(
            logits, data, global_valid_seqs, global_valid_toks, vocab_parallel_rank=None, vocab_parallel_group=None
        )

    return loss_of


def from_logprobs(loss_fn: LossFunction) -> Callable[..., tuple[torch.Tensor, dict]]:
    def loss_of(model, data, **counts):
        logprobs = token_logprobs(model, data["input_ids"])[:, 1:]
        return loss_fn(data=data, next_token_logprobs=logprobs, **counts)

    return loss_of


def from_prepared_input(loss_fn: LossFunction) -> Callable[..., tuple[torch.Tensor, dict]]:
    def loss_of(model, data, **counts):
        loss_input, data = prepare_loss_input(model(data["input_ids"]), data, loss_fn)
        return loss_fn(data=data, **counts, **loss_input)

    return loss_of


def pack(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(All sequences in one row, each padded to a multiple of 4; where they start, without and with that padding.)"""
    padded = (LENGTHS + 3) // 4 * 4
    starts, padded_starts = (torch.nn.functional.pad(n.cumsum(0), (1, 0)) for n in (LENGTHS, padded))
    tokens = torch.zeros(1, int(padded_starts[-1]), dtype=torch.long)
    for row, (start, length) in enumerate(zip(padded_starts, LENGTHS, strict=False)):
        tokens[0, start : start + length] = input_ids[row, :length]
    return tokens, starts, padded_starts


def from_packed_logits(loss_fn: LossFunction) -> Callable[..., tuple[torch.Tensor, dict]]:
    def loss_of(model, data, global_valid_seqs, global_valid_toks):
        tokens, starts, padded_starts = pack(data["input_ids"])
        wrapped = SequencePackingLossWrapper(loss_fn=loss_fn, cu_seqlens_q=starts, cu_seqlens_q_padded=padded_starts)
        return wrapped(model(tokens), data, global_valid_seqs, global_valid_toks)

    return loss_of


def from_packed_logits_at_once(loss_fn: LossFunction) -> Callable[..., tuple[torch.Tensor, dict]]:
    def loss_of(model, data, **counts):
        tokens, starts, padded_starts = pack(data["input_ids"])
        wrapped = SequencePackingFusionLossWrapper(
            loss_fn, prepare_packed_loss_input, tuple(starts.tolist()), tuple(padded_starts.tolist())
        )
        return wrapped(model(tokens), data, **counts)

    return loss_of


def on_rewards(loss_fn: LossFunction) -> Callable[..., tuple[torch.Tensor, dict]]:
    """A reward model reads one number at the last token of each sequence."""

    def loss_of(model, data, global_valid_seqs, global_valid_toks):
        scores = model(data["input_ids"])
        rewards = scores[torch.arange(ROWS), data["input_lengths"] - 1]
        return loss_fn(rewards, data, global_valid_seqs, global_valid_toks)

    return loss_of


def from_values(loss_fn: LossFunction) -> Callable[..., tuple[torch.Tensor, dict]]:
    """A critic reads one number a token: what it says of a prefix is the value before the next token."""

    def loss_of(model, data, **counts):
        values = torch.nn.functional.pad(model(data["input_ids"])[:, :-1, 0], (1, 0))
        return loss_fn(data=data, logits=values, **counts)

    return loss_of


def make_returns() -> BatchedDataDict:
    data = make_batch()
    data["returns"], data["values"] = torch.full((ROWS, LENGTH), 0.7), torch.zeros(ROWS, LENGTH)
    return data


def make_teacher(top_k: int = 4) -> BatchedDataDict:
    data = make_batch()
    logits = torch.randn(ROWS, LENGTH, VOCAB, generator=torch.Generator().manual_seed(2))
    data["teacher_topk_logits"], data["teacher_topk_indices"] = logits.topk(top_k, dim=-1)
    return data


def main() -> None:
    train("sft, logits", make_model(), make_batch(), from_logits(NLLLoss()))
    train("sft, logprobs", make_model(), dict(make_batch()), from_logprobs(NLLLossFn()))
    train("sft, packed", make_model(), make_batch(), from_packed_logits(NLLLoss()))
    train("sft, packed at once", make_model(), make_batch(), from_packed_logits_at_once(NLLLossFn()))
    train("sft, own loss", make_model(), make_batch(), from_prepared_input(OwnLoss()))
    train("sft, own loss packed", make_model(), make_batch(), from_packed_logits(OwnLoss()))

    train("grpo, logits", make_model(), make_rollouts(), from_logits(ClippedPGLossFn(LOSS_FN)))
    train("grpo, logprobs", make_model(), make_rollouts(), from_logprobs(ClippedPGLossFn(cfg=LOSS_FN)))
    train("grpo, prepared", make_model(), make_rollouts(), from_prepared_input(ClippedPGLossFn(LOSS_FN)))
    train("grpo, packed", make_model(), make_rollouts(), from_packed_logits(ClippedPGLossFn(LOSS_FN)))
    train("grpo, packed at once", make_model(), make_rollouts(), from_packed_logits_at_once(ClippedPGLossFn(LOSS_FN)))

    train("dpo, logits", make_model(), make_preferences(), from_logits(DPOLossFn(DPO)))
    train("dpo, logprobs", make_model(), make_preferences(), from_logprobs(DPOLossFn(DPO)))
    train("dpo, packed", make_model(), make_preferences(), from_packed_logits(DPOLossFn(DPO)))

    train("reward model, rewards", make_model(outputs=1), make_preferences(), on_rewards(PreferenceLoss()))
    value_loss = MseValueLossFn(MseValueLossConfig(scale=1.0, cliprange=0.2))
    train("value, logits", make_model(outputs=1), make_returns(), from_values(value_loss))
    distillation = DistillationLossFn({"kl_type": "mixed", "mixed_kl_weight": 0.5, "zero_outside_topk": False})
    train("distillation, prepared", make_model(), make_teacher(), from_prepared_input(distillation))

    assert PreferenceLossFn is PreferenceLoss and NLLLossFn is NLLLoss
    ratio = torch.tensor([[0.5, -0.5]])
    print(json.dumps({"name": "k3", "values": calculate_kl(torch.zeros(1, 2), ratio, "k3", None, None).tolist()[0]}))


if __name__ == "__main__":
    main()
