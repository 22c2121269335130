"""Accept older names of configuration keys and values.

An older name is replaced while a configuration is loaded, wherever it was written: in a YAML file of the user, an
override, a stage, or the config.yaml of an older run or checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from rl_megatron import log
from rl_megatron.config.errors import ConfigError

# Older key, or NeMo's, -> key, as paths in a run without stages. Stages may set the same keys.
KEY_ALIASES = {
    "data.num_eval_rows": "data.num_eval_examples",
    "data.task.prompt_template": "data.prompt_template",
    "peft.dim": "peft.r",
    "peft.alpha": "peft.lora_alpha",
    "peft.dropout": "peft.lora_dropout",
}
# Key -> older value -> value.
VALUE_ALIASES = {"generation.engine": {"megatron": "embedded"}}


def rename_overrides(overrides: Iterable[str]) -> list[str]:
    """Return Hydra overrides with today's keys.

    Raises:
        ConfigError: One override sets a key by its older name, and another by its name.
    """
    renamed, written = [], {}
    for override in overrides:
        key, equals, value = override.partition("=")
        path = key.lstrip("+~")
        now = _renamed_path(path)
        if written.setdefault(now, path) != path:
            raise _both(*sorted((written[now], path), key=lambda each: each == now))
        renamed.append(key.removesuffix(path) + now + equals + value)
    return renamed


def rename_tree(tree: Mapping[str, Any], prefix: str = "", where: str = "", older_wins: bool = False) -> dict[str, Any]:
    """Return a configuration, or a section of one, with today's keys and values.

    Args:
        tree: The mappings, which stay as they are.
        prefix: The path of the section in the configuration, such as "data".
        where: The beginning of an error message, which names the file.
        older_wins: Whether a key that is there under both names takes the value of the older one. In a composed
            configuration the other value is a default, since files and overrides that set both are refused before.

    Raises:
        ConfigError: A section has a key under both its older name and its name.
    """
    renamed: dict[str, Any] = {}
    raised: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        now = _renamed_path(path)
        new_key = key if now == path else now.rpartition(".")[2]
        if new_key != key and new_key in tree and not older_wins:
            raise _both(path, now, where)
        if new_key == key and new_key in renamed:
            continue  # its older name came first, and wins
        if isinstance(value, Mapping):
            below, moved = _without_moved(value, path)
            renamed[new_key] = rename_tree(below, path, where, older_wins)
            raised |= moved
        else:
            renamed[new_key] = _renamed_value(now, value)
    for key, (older, value) in raised.items():
        if key in tree and not older_wins:
            raise _both(older, f"{prefix}.{key}", where)
        renamed[key] = value
    return renamed


class UserFiles(FileConfigSource):
    """A source of YAML files for Hydra, in which older names of keys are replaced before files are merged."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of its addresses in Hydra's search path."""
        return "user"

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file, with today's names of its keys and values."""
        result = super().load_config(config_path)
        package = result.header.get("package")
        group = config_path.rpartition("/")[0].replace("/", ".")
        prefix = group if package is None else str(package).removeprefix("_global_").removeprefix(".")
        if isinstance(result.config, DictConfig):
            if not prefix and "hydra" in result.config:
                raise ConfigError(
                    f"{self.path}/{config_path}.yaml: the section hydra has no effect: a run does not use Hydra's own "
                    "settings; delete it, and set output_dir instead of hydra.run.dir"
                )
            tree: Any = OmegaConf.to_container(result.config, resolve=False)
            result.config = OmegaConf.create(rename_tree(tree, prefix, f"{self.path}/{config_path}.yaml: "))
        return result


SourcesRegistry.instance().register(UserFiles)


def _renamed_path(path: str) -> str:
    before, alone = _without_stage(path)
    if alone not in KEY_ALIASES:
        return path
    now = KEY_ALIASES[alone]
    log.once(f"{alone} is an older name of {now}; it works as before")
    return before + now


def _renamed_value(path: str, value: Any) -> Any:
    key = _without_stage(path)[1]
    aliases = VALUE_ALIASES.get(key, {})
    if not isinstance(value, str) or value not in aliases:
        return value
    log.once(f"{key}={value} is an older name of {key}={aliases[value]}; it works as before")
    return aliases[value]


def _without_moved(section: Mapping[str, Any], path: str) -> tuple[dict[str, Any], dict[str, tuple[str, Any]]]:
    """Return the section without keys that are now in the section around it, and those: key → (older path, value)."""
    kept, moved = {}, {}
    around = path.rpartition(".")[0]
    for key, value in section.items():
        now, _, new_key = _renamed_path(f"{path}.{key}").rpartition(".")
        if now == around:
            moved[new_key] = (f"{path}.{key}", value)
        else:
            kept[key] = value
    return kept, moved


def _without_stage(path: str) -> tuple[str, str]:
    """Return "stages.NAME." and the rest of a path, or "" and the path if it is not of a stage."""
    parts = path.split(".", 2)
    if parts[0] == "stages" and len(parts) == 3:
        return ".".join(parts[:2]) + ".", parts[2]
    return "", path


def _both(older: str, now: str, where: str = "") -> ConfigError:
    return ConfigError(f"{where}{older} and {now} are both set, but they are the same setting; keep {now}")
