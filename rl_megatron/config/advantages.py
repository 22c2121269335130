"""Declarations of the advantage estimators that `algorithm.advantage_estimator` can choose.

An estimator is a function that names what it needs as its parameters. The functions are registered in
rl_megatron/algorithms/advantage_estimators.py; their parameters are declared here, where a configuration is checked
without torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.import_strings import is_import_string, load_object
from rl_megatron.config.loading.registry import Registry

GIVEN = (
    "rewards", "group_size", "sample_mask", "token_mask", "token_rewards", "turns", "rollouts", "ranks",
    "component_rewards", "component_weights",
)  # fmt: skip
OPTIONS = {"leave_one_out": False, "normalize_std": True}  # keys of the algorithm section, with their defaults

ESTIMATORS: Registry[frozenset[str]] = Registry("advantage estimator")  # the names of the parameters of each
ESTIMATORS.register("group_relative")(frozenset({"rewards", "group_size", "sample_mask", *OPTIONS}))
ESTIMATORS.register("group_relative_turns")(frozenset({"token_rewards", "turns", "group_size", *OPTIONS}))
ESTIMATORS.register("group_relative_steps")(frozenset({"token_rewards", "turns", "group_size", "normalize_std"}))
ESTIMATORS.register("reinforce_plus_plus")(frozenset({"token_rewards", "token_mask", "ranks"}))
ESTIMATORS.register("reinforce_plus_plus_baseline")(
    frozenset({"rewards", "group_size", "sample_mask", "token_mask", "ranks"})
)
ESTIMATORS.register("group_decoupled")(frozenset({"component_rewards", "component_weights", "group_size", "ranks"}))
ESTIMATORS.register("optimal_baseline")(frozenset({"rewards", "group_size", "sample_mask", "token_mask"}))

_OF_GROUPS = ("optimal_baseline", "group_relative_turns", "group_relative_steps")
_OF_ALL_SAMPLES = frozenset({"rewards", "group_size", "sample_mask", *OPTIONS})


def takes_all_samples(parameters: frozenset[str]) -> bool:
    """Return whether an estimator with these parameters gets the rewards of all samples, on every rank.

    Others get tokens, and therefore the samples of one data-parallel rank at a time.
    """
    return parameters <= _OF_ALL_SAMPLES


def takes_whole_batch(parameters: frozenset[str], name: str) -> bool:
    """Return whether an estimator gets the whole batch: one of the user's own that takes tokens, but not `ranks`.

    Those of the package that take tokens of groups compare within groups only.
    """
    return not takes_all_samples(parameters) and "ranks" not in parameters and name not in _OF_GROUPS


def takes_whole_groups(parameters: frozenset[str]) -> bool:
    """Return whether an estimator that gets tokens needs all samples of a prompt at the same time."""
    return not takes_all_samples(parameters) and bool(
        parameters & {"group_size", "turns", "rollouts", "rewards", "component_rewards"}
    )


def can_leave_out_samples(parameters: frozenset[str]) -> bool:
    """Return whether an estimator with these parameters can tell which samples failed.

    Their rewards are 0, and their token_mask too; they have no turn, and no score of a reward function.
    """
    if parameters & {"sample_mask", "rollouts"}:
        return True
    return "rewards" not in parameters and (
        "token_rewards" not in parameters or bool(parameters & {"token_mask", "turns"})
    )


def known_estimator(name: str) -> str:
    """Return `name` if it is a declared estimator or an import string.

    Raises:
        ValueError: There is no such estimator.
    """
    if name not in ESTIMATORS and not is_import_string(name):
        raise ValueError(f"there is no advantage estimator {name!r}{nearest(name, ESTIMATORS)}")
    return name


def estimator_parameters(name: str) -> frozenset[str]:
    """Return the parameters of an estimator. A user's function is imported.

    Raises:
        ConfigError: The function cannot be imported, or has a parameter that it will not get.
    """
    where = "algorithm.advantage_estimator"
    return parameters_of(load_object(name, where), f"{where}={name}") if is_import_string(name) else ESTIMATORS[name]


def parameters_of(function: Callable[..., Any], where: str) -> frozenset[str]:
    """Return which of `GIVEN` and `OPTIONS` a function takes; **keywords takes all of `GIVEN`.

    Raises:
        ConfigError: It is a class, or has a parameter that is neither and has no default.
    """
    if isinstance(function, type):
        raise ConfigError(f"{where} is a class; an advantage estimator is a function")
    taken = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            taken |= set(GIVEN)
        elif parameter.kind is parameter.POSITIONAL_ONLY or (
            parameter.name not in (*GIVEN, *OPTIONS) and parameter.default is parameter.empty
        ):
            raise ConfigError(
                f"{where} needs {parameter.name!r}, which it will not get; its parameters are given by name, any of "
                f"{', '.join((*GIVEN, *OPTIONS))}"
            )
        elif parameter.name in (*GIVEN, *OPTIONS):
            taken.add(parameter.name)
    return frozenset(taken)
