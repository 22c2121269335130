"""The step of supervised fine-tuning of the same model in transformers, with torch's fused AdamW."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.training.megatron_policy import MegatronPolicy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of weights, gradients and AdamW's moments


def transformers_model(policy: MegatronPolicy) -> torch.nn.Module:
    """Return the model of transformers with a policy's weights, on its device and in its precision."""
    settings, device = dict(policy.weights.plan.hf_config), policy.topology.device
    with torch.device(device):  # its own weights, which are overwritten, are drawn there in no time
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    model = model.to(device, DTYPES[policy.model.precision])
    weights = {name: tensor.clone() for name, tensor in policy.weights.stream()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    if unknown or set(missing) > {"lm_head.weight"}:  # a tied head has no weight of its own
        raise RuntimeError(f"the weights are not those of the transformers model: {missing + unknown}")
    return model


class TransformersStep:
    """A step of the NLL loss on the same weights and microbatches: loss, gradients, clipping and AdamW.

    Padding follows its sequence and attention is causal, so the model needs no attention mask, which would be slower.
    """

    def __init__(self, policy: MegatronPolicy, batch: BatchedDataDict, optimizer: OptimizerConfig, micro_rows: int):
        self.model = transformers_model(policy).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon, weight_decay=optimizer.weight_decay, fused=True,
        )  # fmt: skip
        self.clip_grad = optimizer.clip_grad
        ids, mask = batch["input_ids"], batch["token_mask"] * batch["sample_mask"][:, None]
        labels = ids.masked_fill(mask == 0, -100)
        self.num_tokens = (labels[:, 1:] != -100).sum()
        self.microbatches = list(zip(ids.split(micro_rows), labels.split(micro_rows), strict=True))

    def __call__(self) -> float:
        """Take one step, and return its gradient norm."""
        self.optimizer.zero_grad()
        loss: Tensor | float = 0.0
        for ids, labels in self.microbatches:
            part = self.model(input_ids=ids, labels=labels, num_items_in_batch=self.num_tokens, use_cache=False).loss
            part.backward()
            loss = loss + part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        float(loss)  # a training loop logs it
        return float(norm)
