"""The clipped policy gradient loss, which covers PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO, CISPO, GMPO and SAPO."""

from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.losses.clipped_pg.data import ClippedPGLossDataDict
from rl_megatron.losses.clipped_pg.loss import ClippedPGLossFn

__all__ = ["ClippedPGLossConfig", "ClippedPGLossDataDict", "ClippedPGLossFn"]
