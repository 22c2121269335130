"""Build a Hugging Face model from a refit plan, and sample from it, in the engine's process, without megatron-core."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl_megatron.generation.completions import Completions, left_padded
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.sampling import sample
from rl_megatron.weight_sync.plan import RefitPlan

# Part of a module's name in transformers → its name in checkpoints, by model_type, if they differ.
_RENAMED = {"mixtral": (".mlp.", ".block_sparse_moe.")}
# Routers of transformers that compute in the weights' dtype. The trainer's router computes in fp32, because bf16 scores
# often tie, and another choice of experts gives other logits.
_ROUTERS = ("MixtralTopKRouter", "Qwen3MoeTopKRouter")
_EXPERT_PARTS = {"mixtral": ("w1", "w3", "w2")}  # gate, up, down


def build_model(plan: RefitPlan, device: torch.device) -> PreTrainedModel:
    """Build the model without weights; the first refit fills every one of them."""
    settings = dict(plan.hf_config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with device:
        # Eager code exists for every architecture and every size; grouped matrix products of experts need rows whose
        # size is a multiple of 16 bytes.
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    dtypes = {spec.name: spec.torch_dtype for bucket in plan.buckets for spec in bucket.tensors}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # A router's bias is fp32, whatever the dtype of the others.
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    for module in model.modules():
        if type(module).__name__ in _ROUTERS:
            _route_in_fp32(module)
    return model.eval().requires_grad_(False)


def _route_in_fp32(router: torch.nn.Module) -> None:
    """Make the router compute in fp32, without changing its weights."""
    as_it_was = copy.copy(router)  # it shares the parameters

    def forward(hidden_states: Tensor) -> tuple[Tensor, ...]:
        return functional_call(as_it_was, {"weight": router.get_parameter("weight").float()}, (hidden_states.float(),))

    router.forward = forward


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return views of the model's weights, under the names that they have in a checkpoint.

    A checkpoint has a tensor for each expert, while transformers stacks them: [experts, gate above up, hidden] and
    [experts, hidden, ffn].
    """
    kind = model.config.model_type
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


@torch.inference_mode()
def complete(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniforms: Tensor,
    sampling: Sampling,
    vocab_size: int,
    progress: DecodingProgress | None = None,
) -> Completions:
    """Complete a batch of prompts, until all sequences have ended or the logits of one are NaN.

    Args:
        model: The Hugging Face model.
        prompts: Token ids of b prompts.
        uniforms: The random numbers of `sequence_uniforms`, [b, max_new_tokens].
        sampling: How tokens are sampled.
        vocab_size: Tokens of the tokenizer.
        progress: Reports how far the decoding is, if given.
    """
    tokens, first = left_padded(prompts, model.device)
    completions = Completions(len(prompts), sampling, model.device)
    uniforms = uniforms.to(model.device)
    columns = torch.arange(tokens.size(1) + sampling.max_new_tokens, device=model.device)
    mask = (columns >= first[:, None]).long()
    positions = (columns - first[:, None]).clamp(min=0)
    filled, cache = 0, None
    for step in range(sampling.max_new_tokens):
        end = filled + tokens.size(1)
        output = model(
            input_ids=tokens,
            attention_mask=mask[:, :end],
            position_ids=positions[:, filled:end],
            past_key_values=cache,  # None: the model makes a DynamicCache of its own kind
            use_cache=True,
            logits_to_keep=1,
        )
        filled, cache = end, output.past_key_values
        chosen, logprobs = sample(output.logits[:, -1], uniforms[:, step], sampling, None, vocab_size)
        tokens = completions.add(step, chosen, logprobs)
        if progress is not None:
            progress.token_added(step + 1, sampling.max_new_tokens, completions.running)
        if completions.nan_at.any() or not completions.running.any():
            break
    if progress is not None:
        progress.batch_ended(len(prompts))
    return completions
