"""The clipped policy gradient loss, which covers PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO and CISPO."""

from rl_megatron.losses.clipped_pg.config import ClippedPGLossConfig, ClippedPGLossDataDict
from rl_megatron.losses.clipped_pg.loss import ClippedPGLossFn

__all__ = ["ClippedPGLossConfig", "ClippedPGLossDataDict", "ClippedPGLossFn"]
