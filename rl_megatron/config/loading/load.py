"""Load the configuration of a run: compose it with Hydra, import its plugins, build its dataclasses and check them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from rl_megatron.config import checkpoint_metadata, schema
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.compose import PRIMARY, compose_config
from rl_megatron.config.loading.import_strings import make_absolute
from rl_megatron.config.loading.registry import import_plugins, parse_plugins
from rl_megatron.config.loading.sections import build_section, check_mapping, refuse_missing, refuse_unknown
from rl_megatron.config.secrets import without_secrets
from rl_megatron.config.stages import STAGE_KEYS, build_stage, check_stages, refuse_shadowed

_RUN_KEYS = {field.name for field in fields(schema.RunConfig)}
# In a template on the command line, \n and \t are a line break and a tab, because a shell makes these hard to type.
_TEMPLATES = ("data.prompt_template", "data.answer_template", "data.system_prompt")
_ESCAPE = re.compile(r"\\(\\?)([nt])")
_CHARACTERS = {"n": "\n", "t": "\t"}


def load_config(
    overrides: list[str],
    config_dir: str | None = None,
    config_name: str = PRIMARY,
    settings: Mapping[str, object] | None = None,
    read_model: checkpoint_metadata.ReadModel | None = None,
) -> schema.RunConfig:
    """Return the configuration of a run from `overrides`, after importing its plugins.

    Args:
        overrides: Overrides in Hydra's syntax, as in `experiment=quickstart train.seed=1`.
        config_dir: The user's own directory. Its YAML files are found like the shipped ones (`experiment=mine` selects
            `experiment/mine.yaml`), and its Python modules can be plugins.
        config_name: The primary configuration, which may be a file of `config_dir`.
        settings: Values of keys, as nested mappings, which take precedence over `overrides`.
        read_model: The function that reads the model section of a Hugging Face directory for `model=init_from`. If it
            is None, such directories are refused.

    Raises:
        ConfigError: A key or value is wrong. The message names the key, the value, the rule and, for a mistyped key,
            the nearest one.
    """
    overrides = [_unescape_template(override) for override in overrides]
    composed = compose_config(overrides, config_dir, config_name, read_model)
    tree = merge_settings(composed.tree, settings or {})
    tree.pop("experiment", None)
    import_plugins(parse_plugins(tree.get("plugins")), None if config_dir is None else Path(config_dir))
    make_absolute(tree, config_dir)
    _take_tokenizer(tree)
    refuse_unknown(tree, STAGE_KEYS | _RUN_KEYS, "")
    refuse_missing(tree, STAGE_KEYS)
    alone = str(check_mapping(tree["algorithm"], "algorithm").get("name"))
    if tree.get("output_dir") is None:
        tree["output_dir"] = f"outputs/{composed.experiment or (alone if config_name == PRIMARY else config_name)}"
    named = check_mapping(tree.pop("stages", None), "stages")
    stages = {name: check_mapping(changes, f"stages.{name}") for name, changes in (named or {alone: {}}).items()}
    run = {key: tree.pop(key) for key in list(tree) if key in _RUN_KEYS}
    refuse_shadowed(overrides, stages)
    built = {name: _resolve_files(build_stage(name, tree, changes), config_dir) for name, changes in stages.items()}
    config = replace(build_section(schema.RunConfig, {"stages": {}, **run}, ""), stages=built)
    check_stages(built, is_named=bool(named))
    return config


def _unescape_template(override: str) -> str:
    r"""Return an override in which `\n` in a template is replaced by a line break, and `\t` by a tab.

    A second backslash in front prevents this: `\\n` becomes the two characters `\n`. YAML files are not changed,
    because YAML has its own way to write a line break.
    """
    key = override.partition("=")[0].lstrip("+")
    if key not in _TEMPLATES and not (key.startswith("stages.") and key.endswith(_TEMPLATES)):
        return override
    return _ESCAPE.sub(lambda match: f"\\{match[2]}" if match[1] else _CHARACTERS[match[2]], override)


def _resolve_files(stage: schema.StageConfig, config_dir: str | None) -> schema.StageConfig:
    """Return the stage with absolute paths of the users' files that import strings name."""
    reward, eval_sets = stage.reward.with_absolute_paths(config_dir), stage.eval.with_absolute_paths(config_dir)
    return replace(stage, reward=reward, eval=eval_sets)


def merge_settings(tree: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, Any]:
    """Return `tree` with the values of `settings`; mappings are merged, and everything else is replaced."""
    result = dict(tree)
    for key, value in settings.items():
        if isinstance(value, Mapping):
            below = result.get(key)
            value = merge_settings(below if isinstance(below, Mapping) else {}, value)
        result[key] = value
    return result


def _take_tokenizer(tree: Mapping[str, object]) -> None:
    """Use the tokenizer that the checkpoint `init_from` was imported with, unless `tokenizer.path` is set."""
    init_from, tokenizer = tree.get("init_from"), tree.get("tokenizer")
    if isinstance(init_from, str) and isinstance(tokenizer, dict) and tokenizer.get("path") is None:
        try:
            directory = checkpoint_metadata.find_imported_tokenizer(Path(init_from))
        except OSError as error:  # for example, the name is too long
            raise ConfigError(f"init_from={init_from} cannot be read: {error.strerror}") from error
        tokenizer["path"] = None if directory is None else str(directory)


def to_yaml(config: schema.RunConfig) -> str:
    """Return the effective configuration, with every default filled in, as YAML that `from_yaml` reads.

    Secrets are left out (config/secrets.py).
    """
    tree = without_secrets(TypeAdapter(schema.RunConfig).dump_python(config, mode="json"))
    return yaml.safe_dump(tree, sort_keys=False)


def from_yaml(text: str, where: str) -> schema.RunConfig:
    """Return the configuration that `to_yaml` wrote, after importing its plugins; `where` is its file, for messages.

    Keys that the text does not have, because they were added later, take their default.
    """
    try:
        tree = yaml.safe_load(text)
        if isinstance(tree, Mapping):
            import_plugins(parse_plugins(tree.get("plugins")))
        return TypeAdapter(schema.RunConfig).validate_python(tree)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{where} is not a configuration that this version can read: {error}; restore it, for example from the "
            "config.yaml of a checkpoint, or set another output_dir"
        ) from error
