"""The clipped policy gradient family: PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO, CISPO, with their corrections."""

from rl_megatron.losses.clipped_pg.config import ClippedPGLossConfig, ClippedPGLossDataDict
from rl_megatron.losses.clipped_pg.loss import ClippedPGLossFn

__all__ = ["ClippedPGLossConfig", "ClippedPGLossDataDict", "ClippedPGLossFn"]
