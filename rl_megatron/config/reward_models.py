"""The arguments of the reward function `reward_model` if its models run on the ranks of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.sections import build_section
from rl_megatron.config.loading.settings import Number, PositiveFloat, section
from rl_megatron.config.rewards import RewardConfig

REWARD_MODEL = "reward_model"  # the name of the reward function
OF_STAGES = "stages."  # the beginning of an init_from that names a stage of the run


@section
class ScoringModel:
    """One model with a score head."""

    init_from: str | None = None  # a checkpoint of a reward model, or stages.NAME for an earlier stage's last one
    hf: str | None = None  # a Hugging Face directory of a sequence classifier with one label
    weight: PositiveFloat = 1.0  # its weight in the mean over several models
    mean: Annotated[float, Number] = 0.0  # subtracted from its scores
    std: PositiveFloat = 1.0  # then the scores are divided by it


@section
class RewardModelArguments(ScoringModel):
    """The arguments of a reward model on the ranks of the policy: one model, or several."""

    models: tuple[ScoringModel, ...] = ()  # an ensemble, instead of init_from or hf
    combine: Literal["mean", "min"] = "mean"  # how the scores of an ensemble are combined; the mean is weighted
    # running: subtract the mean of all scores of training so far, and divide by their standard deviation.
    normalize: Literal["none", "running"] = "none"
    clip: PositiveFloat | None = None  # the largest magnitude of the final score; null: no limit
    # Where the weights are kept. resident: on the device. offload: in host memory, and on the device only while
    # scoring.
    placement: Literal["resident", "offload"] = "resident"

    @property
    def members(self) -> tuple[ScoringModel, ...]:
        """Return the models: those of the ensemble, or the only one."""
        return self.models or (self,)


def list_models_on_ranks(settings: RewardConfig) -> dict[int, RewardModelArguments]:
    """Return the arguments of reward functions whose models run on the policy's ranks, by the functions' index."""
    arguments = {}
    for index, function in enumerate(settings.functions):
        if function.name == REWARD_MODEL and function.path is None and "url" not in function.kwargs:
            arguments[index] = _arguments(function.kwargs, f"reward.functions[{index}].kwargs")
    return arguments


def _arguments(kwargs: Mapping[str, object], where: str) -> RewardModelArguments:
    arguments: RewardModelArguments = build_section(RewardModelArguments, kwargs, f"{where}.")
    if arguments.models and (arguments.init_from, arguments.hf, arguments.weight) != (None, None, 1.0):
        raise ConfigError(f"{where}: models is an ensemble, so init_from, hf and weight belong in its entries")
    for number, model in enumerate(arguments.members):
        of_model = f"{where}.models[{number}]" if arguments.models else where
        if (model.init_from is None) == (model.hf is None):
            raise ConfigError(
                f"{of_model}: set one of init_from (a checkpoint of a reward model, or stages.NAME) and hf (a Hugging "
                "Face directory), or url for a model on a server"
            )
    return arguments
