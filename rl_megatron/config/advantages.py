"""Declarations of the advantage estimators that `algorithm.advantage_estimator` can choose.

The functions are registered in rl_megatron/algorithms/advantage_estimators.py. Their declarations are here, so that a
configuration is checked without importing torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import is_import_string, load_object
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.recipes import suggest_method

OPTIONS = {"leave_one_out": False, "normalize_std": True}  # keys of the algorithm section, with their defaults
_OPTIONAL = frozenset({"token_rewards", "component_rewards", "rollouts", *OPTIONS})
_INPUTS = {*_OPTIONAL, "rewards", "group_size", "sample_mask", "token_mask", "turns", "ranks", "component_weights"}


@dataclass(frozen=True)
class Estimator:
    """The properties of an advantage estimator that configuration checks read. A user's function has the defaults.

    Attributes:
        reads: The optional inputs that it may read. A key that affects only inputs that it does not read is refused.
        least_samples: The minimum number of samples per prompt.
        together: What one rank must own as a whole: each "group" or each "trajectory". "sequence": nothing, because the
            estimator needs only rewards, and every rank has the rewards of all samples.
    """

    reads: frozenset[str] = _OPTIONAL
    least_samples: int = 1
    together: Literal["sequence", "trajectory", "group"] = "group"


ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
ESTIMATORS.register("group_relative")(Estimator(frozenset(OPTIONS), 2, "sequence"))
ESTIMATORS.register("group_relative_turns")(Estimator(frozenset({"token_rewards", *OPTIONS}), 2))
ESTIMATORS.register("group_relative_steps")(Estimator(frozenset({"token_rewards", "normalize_std"}), 2))
ESTIMATORS.register("reinforce_plus_plus")(Estimator(frozenset({"token_rewards"}), 1, "trajectory"))
ESTIMATORS.register("reinforce_plus_plus_baseline")(Estimator(frozenset(), 2))
ESTIMATORS.register("group_decoupled")(Estimator(frozenset({"component_rewards"}), 2))
ESTIMATORS.register("optimal_baseline")(Estimator(frozenset(), 2))


def check_estimator_name(name: str) -> str:
    """Return `name` if it is a declared estimator or an import string; raise ValueError otherwise."""
    if name not in ESTIMATORS and not is_import_string(name):
        raise ValueError(f"there is no advantage estimator {name!r}{suggest_method(name, ESTIMATORS)}")
    return name


def get_estimator(name: str) -> Estimator:
    """Return the declaration of an estimator; a user's function is imported and checked."""
    if not is_import_string(name):
        return ESTIMATORS[name]
    where = "algorithm.advantage_estimator"
    check_estimator(load_object(name, where), f"{where}={name}")
    return Estimator()


def check_estimator(function: Callable[..., Any], where: str) -> None:
    """Check that an estimator is a function that can be called with one argument, the inputs."""
    if isinstance(function, type):
        raise ConfigError(f"{where} is a class; an advantage estimator is a function")
    signature = inspect.signature(function)
    required = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) != 1 or required[0].kind is inspect.Parameter.KEYWORD_ONLY or required[0].name in _INPUTS:
        raise ConfigError(
            f"{where} takes {signature}; an advantage estimator takes one argument, (inputs), and reads what it needs "
            f"from it: inputs.{', inputs.'.join(sorted(_INPUTS))}"
        )
