"""Build a Hugging Face model and its adapter from refit plans, in the engine's process, without megatron-core."""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl_megatron.checkpoint.peft_format import PEFT_PREFIX
from rl_megatron.generation.transformers.attention import ATTENTION, compute_gated_delta
from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused

# Part of a module's name in transformers → its name in checkpoints, by model_type, if they differ.
_RENAMED = {"mixtral": (".mlp.", ".block_sparse_moe.")}
# Routers that compute in the weights' dtype in transformers. Here they compute in fp32, as in the trainer, because bf16
# scores often tie, and another choice of experts gives other logits.
_ROUTERS = ("MixtralTopKRouter", "Qwen3MoeTopKRouter", "GptOssTopKRouter", "Qwen3_5MoeTopKRouter")
_DELTA_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
_LETTERS = ("A", "B")
_ADAPTER = ".lora_"
_EXPERT_PARTS = {"mixtral": ("w1", "w3", "w2")}  # gate, up, down


def build_model(plan: RefitPlan, device: torch.device) -> PreTrainedModel:
    """Build the model with arbitrary weights, all of which the first refit overwrites."""
    settings = dict(plan.hf_config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with device:
        # The eager implementation of experts supports every size. Grouped matrix products would need rows whose size is
        # a multiple of 16 bytes.
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, experts_implementation="eager", trust_remote_code=False
        )
    dtypes = {spec.name: spec.torch_dtype for bucket in plan.buckets for spec in bucket.tensors}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # A router's bias is fp32, whatever the dtype of the other tensors.
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    for module in model.modules():
        if type(module).__name__ in _ROUTERS:
            _route_in_fp32(module)
        if type(module).__name__ in _DELTA_NETS:
            module.forward = partial(compute_gated_delta, module)
    return model.eval().requires_grad_(False)


def _route_in_fp32(router: torch.nn.Module) -> None:
    """Make the router compute in fp32, without changing its weights."""
    original = copy.copy(router)  # it shares the parameters

    def forward(hidden_states: Tensor) -> tuple[Tensor, ...]:
        weights = {name: weight.float() for name, weight in router.named_parameters()}
        return functional_call(original, weights, (hidden_states.float(),))

    router.forward = forward


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return views of the model's weights, under their names in a checkpoint.

    A checkpoint has separate tensors for each expert, while transformers stacks them: [experts, gate above up, hidden]
    and [experts, hidden, ffn]. Only checkpoints of gpt-oss have stacked experts, too.
    """
    kind = model.config.model_type
    if kind == "gpt_oss":
        return dict(model.state_dict())
    in_model, in_checkpoint = _RENAMED.get(kind, ("", ""))
    gate, up, down = _EXPERT_PARTS.get(kind, ("gate_proj", "up_proj", "down_proj"))
    tensors = {}
    for name, tensor in model.state_dict().items():
        name = name.replace(in_model, in_checkpoint)
        prefix, _, part = name.rpartition(".")
        if tensor.dim() < 3 or not prefix.endswith(".experts"):
            tensors[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = {gate: weight[: len(weight) // 2], up: weight[len(weight) // 2 :]}
            for projection, block in (parts if part == "gate_up_proj" else {down: weight}).items():
                tensors[f"{prefix}.{expert}.{projection}.weight"] = block
    return tensors


class _AdapterHook:
    """A forward hook that adds s·B·A·x to the output of a linear layer."""

    def __init__(self, down: Tensor, up: Tensor, scaling: float):
        self._down, self._up, self._scaling = down, up, scaling

    def __call__(self, module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear(linear(args[0], self._down) * self._scaling, self._up)


def attach_adapter(model: PreTrainedModel, plan: RefitPlan) -> dict[str, Tensor]:
    """Add the adapter that a refit plan describes to a model, and return the plan's tensors by name.

    The adapter's tensors are zeros until the first weight sync. For modules that are trained whole, weight syncs
    overwrite the base model's tensors. The plan's `hf_config` is the content of an adapter_config.json.

    Raises:
        WeightsRefused: The plan has an adapter for a module that is not a linear layer of the model.
    """
    config = plan.hf_config
    r = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(r) if config["use_rslora"] else r)
    specs = [spec for bucket in plan.buckets for spec in bucket.tensors]
    tensors = {
        spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype, device=model.device)
        for spec in specs
        if _ADAPTER in spec.name
    }
    modules = dict(model.named_modules())
    for module in sorted({name.removeprefix(PEFT_PREFIX).rpartition(_ADAPTER)[0] for name in tensors}):
        if not isinstance(modules.get(module), torch.nn.Linear):
            raise WeightsRefused(f"{module} gets an adapter, but the engine's model has no linear layer of this name")
        down, up = (tensors[f"{PEFT_PREFIX}{module}.lora_{letter}.weight"] for letter in _LETTERS)
        modules[module].register_forward_hook(_AdapterHook(down, up, scaling))
    of_base = checkpoint_tensors(model)  # weight syncs overwrite those of modules that are trained whole
    whole = {spec.name: of_base.get(spec.name.removeprefix(PEFT_PREFIX)) for spec in specs if _ADAPTER not in spec.name}
    return tensors | {name: tensor for name, tensor in whole.items() if tensor is not None}
