"""The workload of a certification: a small model of the user's model family, and a batch that exposes known errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_megatron.batching.config import Batching, BatchingKind
from rl_megatron.batching.packing import round_up
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import as_loss, build_loss
from rl_megatron.losses.contract import LossFunction, LossInputType
from rl_megatron.model.build import Head
from rl_megatron.topology.degrees import sequence_multiple
from rl_megatron.training.runner import FusedHead

SMALL_FUSED_HEAD = FusedHead(block_tokens=10)  # several token blocks per microbatch
WIDTH = 24  # tokens of the longest sequence
NUM_SEQUENCES = 12  # sequences of the batch
VOCAB_SIZE = 50  # padded to a multiple of 64, so that an effect of the padding would show
_TOP_K = 4  # teacher logits per token
_SET_SIZE = 4  # sequences that may share their beginnings
# Sequences that begin like an earlier one, and the number of tokens.
_ALIKE = {1: (0, 4), 2: (0, 11), 5: (4, 9), 7: (5, 12), 9: (8, 5), 10: (8, 20), 11: (10, 14)}
_SAME_TEMPERATURE = [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]  # sequence 6 has another one than its set


@dataclass(frozen=True)
class Objective:
    """A loss, and the head of the model that it trains.

    Attributes:
        loss: The loss's registered name.
        settings: Its settings.
    """

    loss: str
    settings: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> Objective:
        """Return the objective of a configuration's loss section, {name, **settings}."""
        return cls(section["name"], {key: value for key, value in section.items() if key != "name"})

    def build(self) -> LossFunction:
        """Return the loss function."""
        return build_loss(self.loss, self.settings)

    @property
    def head(self) -> Head:
        """Return the head of the model that the loss trains."""
        return "score" if as_loss(self.build()).input_type is LossInputType.LOGIT else "lm"

    @property
    def group_size(self) -> int:
        """Return how many sequences stay together: 2 for a loss on pairs."""
        return as_loss(self.build()).group_size


@dataclass(frozen=True)
class Workload:
    """A model, a batch and the objectives to run on them.

    Attributes:
        model: The model.
        objectives: The objectives by name.
        vocab_size: The tokens of the vocabulary.
        seed: The seed of weights and batch.
        optimizer: The optimizer of the one step that is taken.
        fused_head: The fused head, or None for whole logits.
        precision: "fp32" or "bf16".
        peft: The adapters that are trained, or None if all weights are trained.
    """

    model: ModelConfig
    objectives: dict[str, Objective]
    vocab_size: int = VOCAB_SIZE
    seed: int = 1
    # If ε is much smaller than the gradient, Adam's first step is the gradient's sign, and rounding of a gradient near
    # zero would change the step completely. With this ε, small gradients make small steps.
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-2, epsilon=1e-3)
    fused_head: FusedHead | None = None
    precision: str = "fp32"
    peft: LoraConfig | None = None

    def without_savings(self) -> Workload:
        """Return the same workload without options that only save time or memory: fused head and overlap."""
        return replace(self, fused_head=None, optimizer=replace(self.optimizer, overlap=False))

    def batch(self) -> BatchedDataDict:
        """Return the workload's batch."""
        return build_batch_of_all_kinds(self.vocab_size, self.seed)


STANDARD_OBJECTIVES = {
    "nll": Objective("nll"),
    "clipped_pg": Objective("clipped_pg", {"reference_policy_kl_penalty": 0.05, "entropy_coeff": 0.01}),
    "gspo": Objective(
        "clipped_pg",
        {"sequence_level_importance_ratios": True, "token_level_loss": False, "reference_policy_kl_penalty": 0.0},
    ),
    "dpo": Objective("dpo", {"sft_loss_weight": 0.1}),
    "distillation": Objective("distillation"),
    "reward_model": Objective("preference"),
    "value": Objective("mse_value"),
}


def build_batch_of_all_kinds(vocab_size: int, seed: int) -> BatchedDataDict:
    """Return twelve sequences, which are six pairs, with every key that a registered loss reads from a batch.

    The sequences have different lengths. One has a single token, one has two, one has token_mask 0 everywhere, and the
    last pair has sample_mask 0. Entries that a loss must not read are NaN. Two pairs each form a set of sequences that
    may share their beginnings; most begin like another one of their set, some beyond its prompt.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(4, WIDTH, (NUM_SEQUENCES,), generator=generator)
    lengths[0], lengths[3], lengths[6], lengths[8] = WIDTH, 1, 2, WIDTH // 2
    positions = torch.arange(WIDTH)
    prompt = torch.minimum(torch.full((NUM_SEQUENCES,), 3), lengths - 1)
    token_mask = ((positions >= prompt[:, None]) & (positions < lengths[:, None])).float()
    token_mask[8] = 0.0
    sample_mask = torch.ones(NUM_SEQUENCES)
    sample_mask[10:] = 0.0  # the last pair
    shape = (NUM_SEQUENCES, WIDTH)
    # near the logprobs of a new model, so that some ratios are clipped and others are not
    old = -math.log(vocab_size) + 0.5 * normal(*shape)
    values = normal(*shape)
    streams = {
        "advantages": (0.5 + normal(NUM_SEQUENCES, 1)).expand(shape) + 0.3 * normal(*shape),  # their sum is far from 0
        "prev_logprobs": old,
        "generation_logprobs": old + 0.05 * normal(*shape),
        "reference_policy_logprobs": old + 0.3 * normal(*shape),
        "values": values,
        "returns": values + normal(*shape),
    }
    counts = (token_mask * sample_mask[:, None]) != 0
    # Losses that compare logprobs with those of another policy may read a token's value from the preceding entry.
    read = counts | counts.roll(-1, dims=1)
    streams = {name: torch.where(read, stream, math.nan) for name, stream in streams.items()}
    ids, sets = torch.randint(0, vocab_size, shape, generator=generator), torch.arange(NUM_SEQUENCES) // _SET_SIZE
    for sequence, (like, common) in _ALIKE.items():
        ids[sequence, :common] = ids[like, :common]
    temperature = 0.7 + 0.6 * uniform(NUM_SEQUENCES)
    temperature[_SAME_TEMPERATURE] = temperature[sets[_SAME_TEMPERATURE]]
    batch = BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=token_mask,
        sample_mask=sample_mask,
        temperature=temperature,
        rewards=torch.where(sample_mask > 0, uniform(NUM_SEQUENCES), math.nan),
        teacher_topk_logits=torch.where(read[..., None], 2.0 * normal(*shape, _TOP_K), math.nan),
        teacher_topk_indices=uniform(*shape, vocab_size).argsort(-1)[..., :_TOP_K],
        **streams,
    )
    batch[PREFIX_SET] = sets
    batch["covariance_mask"] = torch.where(read, (uniform(*shape) < 0.3).float(), math.nan)
    desirable = (torch.arange(NUM_SEQUENCES) % 3 != 0).float()
    batch["desirable"] = torch.where(sample_mask > 0, desirable, math.nan)
    batch["num_desirable"] = (desirable * sample_mask).sum().expand(NUM_SEQUENCES)
    batch["reference_point"] = torch.full((NUM_SEQUENCES,), 0.2)
    return batch


def shrink(model: ModelConfig, parallel: ParallelConfig) -> tuple[ModelConfig, ParallelConfig]:
    """Return the smallest model of the same family that the parallel degrees allow, and the parallel section for it.

    The model keeps the ratio of heads to key/value heads, and has biases, norms, tied embeddings, windows, latents and
    experts if the original has them. The stages of an uneven pipeline get fewer layers as well. The experts'
    load-balancing loss is kept only if its scope is "global": with the scope "microbatch", it depends on which
    sequences share a microbatch.
    """
    num_model_chunks = parallel.virtual_pipeline
    uneven = {
        key: num_model_chunks if getattr(parallel, key) is not None else None
        for key in ("first_stage_layers", "last_stage_layers")
    }
    ends = [layers for layers in uneven.values() if layers is not None]
    per_stage = 2 * num_model_chunks if ends or parallel.pipeline * num_model_chunks == 1 else num_model_chunks
    num_layers = sum(ends) + per_stage * (parallel.pipeline - len(ends))
    groups = parallel.tensor if parallel.tensor > 1 or model.num_query_groups == 1 else 2
    heads = groups * (model.num_attention_heads // model.num_query_groups)
    small = replace(
        model,
        num_layers=num_layers,
        hidden_size=16 * heads if model.head_dim is None else 64,
        ffn_hidden_size=32 * parallel.tensor,
        num_attention_heads=heads,
        num_query_groups=groups,
        max_sequence_length=2 * WIDTH,
        init_std=0.15,  # logits far from uniform, so that errors show
        **_filter_set_keys(
            model,
            vocab_size=VOCAB_SIZE + 10,  # the embedding then has rows beyond the tokenizer's, too
            head_dim=16,
            sliding_window=min(model.sliding_window or 7, 7),
            global_attention_every=2,
            query_pre_attn_scalar=12,
            full_attention_every=2,
            linear_num_key_heads=2 * parallel.tensor * parallel.context,
            linear_num_value_heads=4 * parallel.tensor * parallel.context,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=3,
            q_lora_rank=10,
            kv_lora_rank=14,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
        ),
    )
    return replace(small, **_shrink_experts(model, parallel)), replace(parallel, **uneven)


def _filter_set_keys(model: ModelConfig, **values: int) -> dict[str, int]:
    return {key: value for key, value in values.items() if getattr(model, key) is not None}


def _shrink_experts(model: ModelConfig, parallel: ParallelConfig) -> dict[str, object]:
    """Return the keys of a small mixture of experts of the model's kind; empty if the model is dense."""
    if model.num_experts is None:
        return {}
    chosen, divisor, fewest = model.experts_per_token, parallel.expert, max(4, model.experts_per_token + 1)
    if model.router_groups is not None:
        chosen, divisor, fewest = 2, math.lcm(2, parallel.expert), 4  # a token visits one of two groups
    num_experts = -(-fewest // divisor) * divisor
    return {
        "num_experts": num_experts if model.router_groups is not None else min(model.num_experts, num_experts),
        "experts_per_token": chosen,
        "first_dense_layers": min(model.first_dense_layers, 1),
        "router_aux_loss": model.router_aux_loss if model.router_aux_loss_scope == "global" else 0.0,
        "expert_ffn_hidden_size": 32 * parallel.expert_tensor,
        **_filter_set_keys(
            model,
            shared_expert_ffn_hidden_size=32 * parallel.tensor,
            router_groups=2,
            router_groups_per_token=1,
        ),
    }


def check_keys(name: str, loss_fn: LossFunction, batch: BatchedDataDict) -> None:
    """Check that the synthetic batch has every key that a loss reads."""
    missing = sorted(set(getattr(loss_fn, "required_keys", ())) - batch.keys())
    if missing:
        title = getattr(loss_fn, "display_name", type(loss_fn).__name__)
        raise ConfigError(
            f"{name}: {title} reads {missing}, which the synthetic batch does not have; this loss cannot be certified: "
            "leave its stage out"
        )


def build_small_batching(
    kind: BatchingKind, sequences: int, group_size: int, parallel: ParallelConfig, *, share_prefixes: bool = False
) -> Batching:
    """Return the batching of the small batch, whose microbatches have space for at most four groups of sequences."""
    sequences = min(-(-sequences // group_size), 4) * group_size
    tokens = sequences * round_up(WIDTH, sequence_multiple(parallel))
    return Batching(kind, sequences, tokens, share_prefixes=share_prefixes)
