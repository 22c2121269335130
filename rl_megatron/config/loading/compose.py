"""Compose a configuration with Hydra, from the shipped YAML files, the user's own, and overrides."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rl_megatron.config import checkpoint_metadata
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.hints import OPEN_SECTIONS, explain, get_override_key
from rl_megatron.config.loading.import_strings import is_import_string

PRIMARY = "config"  # the name of the shipped primary configuration
_USERS = "command-line"  # what Hydra calls the provider of the user's directory
# Overrides of Hydra's own settings → what to write instead.
_OF_HYDRA = {
    "hydra.run.dir": "write output_dir={value}",
    "hydra.sweep.dir": "write output_dir={value}; every job of a sweep gets a directory in it",
    "hydra.sweep.subdir": "the directory of a job is named after its overrides; leave it out",
    "hydra.searchpath": "write --config-dir DIR",
    "hydra.mode": "write --multirun",
}


@dataclass(frozen=True)
class Composed:
    """A configuration that Hydra composed.

    Attributes:
        tree: The configuration as plain mappings and lists, with interpolations resolved.
        experiment: The name of the chosen experiment, or None if none is chosen.
    """

    tree: dict[str, Any]
    experiment: str | None


class _ReadOnce(ConfigRepository):
    """A repository of the files that Hydra composes. It reads users' files every time, others once per process."""

    _results: ClassVar[dict[tuple[str, str], ConfigResult | None]] = {}  # (source, file) -> its content

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None:
            return super().load_config(config_path)
        key = (source.path, config_path)
        if source.provider == _USERS:
            return _without_hydra(super().load_config(config_path), f"{source.path}/{config_path}.yaml")
        if key not in self._results:
            self._results[key] = super().load_config(config_path)
        return copy.deepcopy(self._results[key])  # Hydra modifies the result


@contextmanager
def hydra_session(config_dir: str | None, read_model: checkpoint_metadata.ReadModel | None = None) -> Iterator[Hydra]:
    """Yield Hydra with the shipped YAML files on its search path, and after them those of `config_dir`."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a directory")
    # For configs/model/init_from.yaml.
    model_key = partial(checkpoint_metadata.read_model_key, read=read_model)
    OmegaConf.register_new_resolver("of_checkpoint", model_key, replace=True)
    search_path = create_config_search_path(str(config_directory()))
    if config_dir is not None:
        before_schema = SearchPathQuery(provider="schema")  # Hydra needs the schema to come last
        search_path.prepend(_USERS, str(Path(config_dir).resolve()), anchor=before_schema)
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2("rl-megatron", search_path)
        cast(ConfigLoaderImpl, hydra.config_loader).repository = _ReadOnce(search_path)
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def config_directory() -> Path:
    """Return the directory of the shipped YAML files: in the installed package, or `configs/` of a source tree."""
    installed = Path(__file__).resolve().parents[2] / "configs"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "configs"


def compose_config(
    overrides: list[str],
    config_dir: str | None,
    config_name: str = PRIMARY,
    read_model: checkpoint_metadata.ReadModel | None = None,
) -> Composed:
    """Return the configuration composed from `config_name` and `overrides`; `load_config` documents the arguments."""
    for override in overrides:
        _refuse_settings_of_hydra(override)
    if _chooses_own_loss(overrides) and not any(get_override_key(override) == "loss" for override in overrides):
        overrides = [*overrides, "loss=own"]  # the default loss has other keys than the user's
    _refuse_several_experiments(overrides)
    with hydra_session(config_dir, read_model):
        try:
            _refuse_unknown_stages(overrides, config_name)
            config = compose(config_name, overrides=as_additions(overrides), return_hydra_config=True)
            experiment = config.hydra.runtime.choices.get("experiment")
            with open_dict(config):
                del config["hydra"]
            tree = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
            return Composed(cast(dict[str, Any], tree), experiment)
        except ConfigError:
            raise
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            _refuse_unknown_primary(error, config_name, config_dir)
            groups = [override for override in overrides if "." not in get_override_key(override)]
            message = _find_resolver_message(error) or explain(error, overrides, _tree(groups, config_name))
            raise ConfigError(message) from error


def as_additions(overrides: list[str]) -> list[str]:
    """Return the overrides, with `++` before keys that Hydra does not know but the schema checks later."""
    # configs/config.yaml has no keys of unused services and adapters, no goals, and no arguments of users' workers and
    # environments.
    mappings = ("train.stop_at", "rollout.worker_kwargs", "rollout.environment.kwargs", "rollout.agent.environment")
    sections = (*OPEN_SECTIONS, "logger.", "peft.", *mappings)
    if _chooses_own_loss(overrides):
        sections = (*sections, "loss.")
    return [f"++{override}" if override.startswith(sections) else override for override in overrides]


def _chooses_own_loss(overrides: list[str]) -> bool:
    """Return whether an override names a loss by an import string."""
    values = (
        override.partition("=")[2].strip("'\"") for override in overrides if get_override_key(override) == "loss.name"
    )
    return any(map(is_import_string, values))


def _tree(overrides: list[str], config_name: str) -> Mapping[str, object]:
    """Return the configuration composed with `overrides`, or an empty one if Hydra refuses them."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(compose(config_name, overrides=overrides)))
    except (HydraException, OmegaConfBaseException, ValueError):
        return {}  # the choice of a preset is itself wrong, and Hydra's message lists the choices


def _find_resolver_message(error: BaseException | None) -> str | None:
    """Return the message of the ConfigError that caused `error` (a resolver raised it), or None if none did."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return None if error is None else str(error)


def _refuse_settings_of_hydra(override: str) -> None:
    key, value = get_override_key(override), override.partition("=")[2]
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        remedy = _OF_HYDRA.get(key, "leave it out").format(value=value)
        raise ConfigError(f"override {override!r} has no effect: a run does not use Hydra's own settings; {remedy}")


def _without_hydra(result: ConfigResult | None, file: str) -> ConfigResult | None:
    """Return a user's file; raise ConfigError if it has the section `hydra`."""
    if result is not None and isinstance(result.config, DictConfig) and "hydra" in result.config:
        raise ConfigError(
            f"{file}: the section hydra has no effect: a run does not use Hydra's own settings; delete it, and set "
            "output_dir instead of hydra.run.dir"
        )
    return result


def _refuse_unknown_primary(error: Exception, name: str, config_dir: str | None) -> None:
    if str(error).startswith("Cannot find primary config"):
        directories = [config_directory(), *([] if config_dir is None else [Path(config_dir)])]
        choices = {path.stem for directory in directories for path in directory.glob("*.yaml")}
        raise ConfigError(
            f"--config-name {name}: there is no such file, shipped or in --config-dir{nearest(name, choices)}"
        ) from error


def _refuse_several_experiments(overrides: list[str]) -> None:
    chosen = [override for override in overrides if get_override_key(override) == "experiment"]
    names = [name.strip("[] ") for override in chosen for name in override.partition("=")[2].split(",")]
    is_list = any(override.partition("=")[2].lstrip().startswith("[") for override in chosen)
    if is_list or len(chosen) > 1:
        raise ConfigError(
            f"experiment={','.join(names)}: a run has one experiment; choose one, or run each of them with --multirun "
            f"experiment={','.join(names)}"
        )


def _refuse_unknown_stages(overrides: list[str], config_name: str) -> None:
    """Refuse overrides of stages that the experiment does not have; Hydra would add such a stage."""
    named = [override for override in overrides if get_override_key(override).startswith("stages.")]
    if not named:
        return
    others = [override for override in overrides if override not in named]
    stages = compose(config_name, overrides=as_additions(others)).get("stages") or {}
    for override in named:
        name = get_override_key(override).split(".")[1]
        if name not in stages:
            hint = nearest(name, stages) if stages else "; it has no stages: leave stages.NAME out"
            raise ConfigError(f"override {override!r}: the experiment has no stage {name!r}{hint}")
