"""Published methods that are settings of an algorithm and a loss, for messages about unknown losses and algorithms."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rl_megatron.config.errors import nearest

_GRPO = "algorithm=grpo loss=clipped_pg"
_NO_KL = "loss.reference_policy_kl_penalty=0"
# The name of a method → overrides. docs/losses.md describes the methods.
RECIPES = {
    "GRPO": f"{_GRPO} loss.token_level_loss=false loss.reference_policy_kl_penalty=0.04",
    "Dr. GRPO": f"{_GRPO} algorithm.normalize_std=false loss.fixed_sequence_length=32 generation.max_new_tokens=32 "
    f"{_NO_KL}",
    "DAPO": f"{_GRPO} algorithm.dynamic_sampling=true loss.ratio_clip_max=0.28 {_NO_KL}",
    "GSPO": f"{_GRPO} loss.sequence_level_importance_ratios=true loss.token_level_loss=false loss.ratio_clip_min=3e-4 "
    f"loss.ratio_clip_max=4e-4 {_NO_KL}",
    "CISPO": f"{_GRPO} loss.use_cispo=true loss.ratio_clip_min=1.0 loss.ratio_clip_max=4.0 {_NO_KL}",
    "GMPO": f"{_GRPO} loss.use_gmpo=true loss.token_level_loss=false loss.ratio_clip_min=0.4 loss.ratio_clip_max=0.4 "
    f"{_NO_KL}",
    "SAPO": f"{_GRPO} loss.use_sapo=true loss.token_level_loss=false {_NO_KL}",
    "Clip-Cov": f"{_GRPO} loss.use_clip_cov=true {_NO_KL}",
    "KL-Cov": f"{_GRPO} algorithm.updates_per_rollout=2 loss.use_kl_cov=true {_NO_KL}",
    "OPO": f"{_GRPO} algorithm.advantage_estimator=optimal_baseline {_NO_KL}",
    "GDPO": f"{_GRPO} algorithm.advantage_estimator=group_decoupled {_NO_KL}",
    "RLOO": f"{_GRPO} algorithm.leave_one_out=true algorithm.normalize_std=false loss.disable_ppo_ratio=true "
    f"loss.fixed_sequence_length=1 {_NO_KL}",
    "REINFORCE++": f"{_GRPO} algorithm.advantage_estimator=reinforce_plus_plus loss.use_kl_in_reward=true "
    "loss.reference_policy_kl_type=k1",
    "REINFORCE++-baseline": f"{_GRPO} algorithm.advantage_estimator=reinforce_plus_plus_baseline "
    "loss.reference_policy_kl_type=k2",
    "PPO": "algorithm=ppo loss=clipped_pg loss.use_kl_in_reward=true loss.reference_policy_kl_type=k1",
    "IPO": "algorithm=dpo loss=ipo",
    "SimPO": "algorithm=dpo loss=simpo",
    "CPO": "algorithm=dpo loss=cpo",
    "ORPO": "algorithm=dpo loss=orpo",
}


def suggest_method(name: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown loss, algorithm or advantage estimator.

    It has the settings of the published method of this name or, if there is none, the known names (`choices`).
    """
    title = next((title for title in RECIPES if _simplify(title) == _simplify(name)), None)
    if title is None:
        return nearest(name, choices, lists_all=True)
    return f"; for {title}, set {RECIPES[title]} (docs/losses.md, Recipes)"


def _simplify(name: str) -> str:
    """Return a name as it is compared: `dr_grpo` and `Dr. GRPO` are equal, and so are `reinforce_plus_plus` and ++."""
    return re.sub("[^a-z]", "", name.lower().replace("+", "plus"))
