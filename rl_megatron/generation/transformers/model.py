"""Build a Hugging Face model from a refit plan, in the engine's process, without megatron-core."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl_megatron.generation.transformers.attention import ATTENTION, gated_delta
from rl_megatron.weight_sync.buckets import RefitPlan

# Part of a module's name in transformers → its name in checkpoints, by model_type, if they differ.
_RENAMED = {"mixtral": (".mlp.", ".block_sparse_moe.")}
# Routers of transformers that compute in the weights' dtype. The trainer's router computes in fp32, because bf16 scores
# often tie, and another choice of experts gives other logits.
_ROUTERS = ("MixtralTopKRouter", "Qwen3MoeTopKRouter", "GptOssTopKRouter", "Qwen3_5MoeTopKRouter")
_DELTA_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
_EXPERT_PARTS = {"mixtral": ("w1", "w3", "w2")}  # gate, up, down


def build_model(plan: RefitPlan, device: torch.device) -> PreTrainedModel:
    """Build the model without weights; the first refit fills every one of them."""
    settings = dict(plan.hf_config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with device:
        # Eager code of experts exists for every size; grouped matrix products need rows whose size is a multiple of 16
        # bytes.
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, experts_implementation="eager", trust_remote_code=False
        )
    dtypes = {spec.name: spec.torch_dtype for bucket in plan.buckets for spec in bucket.tensors}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # A router's bias is fp32, whatever the dtype of the others.
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    for module in model.modules():
        if type(module).__name__ in _ROUTERS:
            _route_in_fp32(module)
        if type(module).__name__ in _DELTA_NETS:
            module.forward = partial(gated_delta, module)
    return model.eval().requires_grad_(False)


def _route_in_fp32(router: torch.nn.Module) -> None:
    """Make the router compute in fp32, without changing its weights."""
    as_it_was = copy.copy(router)  # it shares the parameters

    def forward(hidden_states: Tensor) -> tuple[Tensor, ...]:
        weights = {name: weight.float() for name, weight in router.named_parameters()}
        return functional_call(as_it_was, weights, (hidden_states.float(),))

    router.forward = forward


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return views of the model's weights, under the names that they have in a checkpoint.

    A checkpoint has a tensor for each expert, while transformers stacks them: [experts, gate above up, hidden] and
    [experts, hidden, ffn]. gpt-oss alone has stacked experts in checkpoints, too.
    """
    kind = model.config.model_type
    if kind == "gpt_oss":
        return dict(model.state_dict())
    here, there = _RENAMED.get(kind, ("", ""))
    gate, up, down = _EXPERT_PARTS.get(kind, ("gate_proj", "up_proj", "down_proj"))
    found = {}
    for name, tensor in model.state_dict().items():
        name = name.replace(here, there)
        prefix, _, part = name.rpartition(".")
        if tensor.dim() < 3 or not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = {gate: weight[: len(weight) // 2], up: weight[len(weight) // 2 :]}
            for each, block in (parts if part == "gate_up_proj" else {down: weight}).items():
                found[f"{prefix}.{expert}.{each}.weight"] = block
    return found
