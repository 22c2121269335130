"""The table of NeMo RL's modules and their members, for both generations of NeMo RL."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from rl_megatron import losses
from rl_megatron.compat.nemo_rl import (
    advantages,
    batch_settings,
    batched_data_dict,
    environments,
    loss_inputs,
    reward_shaping,
    settings,
)
from rl_megatron.compat.nemo_rl import losses as nemo_losses
from rl_megatron.losses.functional import masked_mean
from rl_megatron.policy import interfaces as policy

_INTERFACES = {"LossFunction": losses.LossFunction, "LossType": losses.LossType}
_LOSSES = {
    "ClippedPGLossConfig": settings.ClippedPGLossConfig,
    "ClippedPGLossDataDict": losses.ClippedPGLossDataDict,
    "ClippedPGLossFn": nemo_losses.ClippedPGLossFn,
    "DPOLossConfig": settings.DPOLossConfig,
    "DPOLossDataDict": losses.DPOLossDataDict,
    "DPOLossFn": nemo_losses.DPOLossFn,
    "DistillationLossConfig": settings.DistillationLossConfig,
    "DistillationLossDataDict": losses.DistillationLossDataDict,
    "DistillationLossFn": nemo_losses.DistillationLossFn,
    "DraftCrossEntropyLossFn": losses.DraftCrossEntropyLossFn,
    "MseValueLossConfig": settings.MseValueLossConfig,
    "MseValueLossFn": nemo_losses.MseValueLossFn,
    "NLLLoss": nemo_losses.NLLLoss,
    "NLLLossFn": nemo_losses.NLLLoss,
    "PreferenceLoss": losses.PreferenceLoss,
    "PreferenceLossDataDict": losses.PreferenceLossDataDict,
    "PreferenceLossFn": losses.PreferenceLoss,
    "Tensor": TypeVar("Tensor", bound=torch.Tensor),
}
_LOGITS_WRAPPER = {"SequencePackingLossWrapper": losses.SequencePackingLossWrapper}
_WRAPPERS = {
    "SequencePackingFusionLossWrapper": loss_inputs.PackedLossWrapper,
    "SequencePackingLossWrapper": loss_inputs.PackedLossWrapper,
    "wrap_loss_fn_with_input_preparation": loss_inputs.wrap_loss_fn_with_input_preparation,
}
_INPUTS = {
    "prepare_loss_input": loss_inputs.prepare_loss_input,
    "prepare_packed_loss_input": loss_inputs.prepare_packed_loss_input,
}
_ADVANTAGES = {
    "AdvEstimatorConfig": advantages.AdvEstimatorConfig,
    "GAEConfig": advantages.GAEConfig,
    "GDPOAdvantageEstimator": advantages.GDPOAdvantageEstimator,
    "GRPOAdvantageEstimator": advantages.GRPOAdvantageEstimator,
    "GeneralizedAdvantageEstimator": advantages.GeneralizedAdvantageEstimator,
    "RawRewardAdvantageEstimator": advantages.RawRewardAdvantageEstimator,
    "ReinforcePlusPlusAdvantageEstimator": advantages.ReinforcePlusPlusAdvantageEstimator,
}

MODULES: dict[str, dict[str, Any]] = {
    "nemo_rl.algorithms.advantage_estimator": _ADVANTAGES,
    "nemo_rl.algorithms.grpo": {
        "AdvEstimatorConfig": advantages.AdvEstimatorConfig,
        "RewardScalingConfig": reward_shaping.RewardScalingConfig,
        "scale_rewards": reward_shaping.scale_rewards,
    },
    "nemo_rl.algorithms.interfaces": _INTERFACES,
    "nemo_rl.algorithms.loss": _LOSSES | _WRAPPERS | _INPUTS,
    "nemo_rl.algorithms.loss.interfaces": _INTERFACES
    | {"LossInputType": losses.LossInputType, "MetricNormalizer": nemo_losses.MetricNormalizer},
    "nemo_rl.algorithms.loss.loss_functions": _LOSSES,
    "nemo_rl.algorithms.loss.loss_input": _INPUTS,
    "nemo_rl.algorithms.loss.utils": _INPUTS,
    "nemo_rl.algorithms.loss.wrapper": _WRAPPERS,
    "nemo_rl.algorithms.loss_functions": _LOSSES | _LOGITS_WRAPPER,
    "nemo_rl.algorithms.reward_functions": {
        "RewardShapingConfig": reward_shaping.RewardShapingConfig,
        "apply_reward_shaping": reward_shaping.apply_reward_shaping,
    },
    "nemo_rl.algorithms.utils": {
        "calculate_baseline_and_std_per_prompt": advantages.calculate_baseline_and_std_per_prompt,
        "calculate_kl": nemo_losses.calculate_kl,
        "calculate_kl_penalty_joschu2020": nemo_losses.calculate_kl_penalty_joschu2020,
        "get_gdpo_reward_component_keys": advantages.get_gdpo_reward_component_keys,
        "masked_mean": masked_mean,
    },
    "nemo_rl.distributed.batched_data_dict": {
        "BatchedDataDict": batched_data_dict.BatchedDataDict,
        "DynamicBatchingArgs": batch_settings.DynamicBatchingArgs,
        "SequencePackingArgs": batch_settings.SequencePackingArgs,
        "SlicedDataDict": batched_data_dict.BatchedDataDict,
    },
    "nemo_rl.data.interfaces": {"LLMMessageLogType": environments.LLMMessageLogType},
    "nemo_rl.environments.interfaces": {
        "EnvironmentInterface": environments.EnvironmentInterface,
        "EnvironmentReturn": environments.EnvironmentReturn,
    },
    "nemo_rl.models.policy.interfaces": {
        "ColocatablePolicyInterface": policy.ColocatablePolicyInterface,
        "LogprobOutputSpec": policy.LogprobOutputSpec,
        "PolicyInterface": policy.PolicyInterface,
        "ReferenceLogprobOutputSpec": policy.ReferenceLogprobOutputSpec,
        "TopkLogitsOutputSpec": policy.TopkLogitsOutputSpec,
    },
}

_NO_RAY = "this package does not use Ray: start one process for each GPU with torchrun"
_NO_MEDIA = "multimodal batches are not provided: train a text-only model"
_NO_LOOP = "the training loop of rl_megatron is `torchrun -m rl_megatron train algorithm=grpo`, which does not use Ray"

# Module or member that is not provided → the reason, for the error.
LEFT_OUT = {
    "nemo_rl.algorithms.advantage_estimator.OPDAdvantageEstimator": (
        "on-policy distillation is `rl_megatron train algorithm=on_policy_distillation`"
    ),
    "nemo_rl.algorithms.grpo.async_grpo_train": _NO_LOOP,
    "nemo_rl.algorithms.grpo.grpo_train": _NO_LOOP,
    "nemo_rl.algorithms.grpo.setup": _NO_LOOP,
    "nemo_rl.algorithms.grpo.validate": _NO_LOOP,
    "nemo_rl.data.interfaces.VLMMessageLogType": _NO_MEDIA,
    "nemo_rl.data.multimodal_utils": _NO_MEDIA,
    "nemo_rl.distributed.batched_data_dict.PackedTensor": _NO_MEDIA,
    "nemo_rl.distributed.ray_actor_environment_registry": _NO_RAY,
    "nemo_rl.distributed.virtual_cluster": _NO_RAY,
    "nemo_rl.distributed.worker_groups": _NO_RAY,
    "nemo_rl.models.policy.lm_policy": _NO_RAY,
}
