"""Complete the prompts of a file with a checkpoint or a Hugging Face directory, for `rl-megatron generate`.

Mistakes in options, paths and prompts are reported before torch is imported.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rl_megatron import log
from rl_megatron.checkpoint.directory import check_checkpoint, check_head, read_manifest, read_model_section
from rl_megatron.checkpoint.hf_directory import find_weight_files, read_directory
from rl_megatron.config.checkpoint_metadata import MANIFEST, find_imported_tokenizer, find_run_tokenizer
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.hints import get_override_key
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.rules import check_model
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.data.prompt_files import RENDERING_KEYS, FilePrompts, build_prompts_config, read_prompts
from rl_megatron.data.run_tokenizer import build_tokenizer
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.completions_file import COMPLETIONS_PER_BLOCK, CompletionsFile, check_output

# The sections and keys that have an effect. A key of a stage comes after `stages.NAME.`.
_SECTIONS = ("model", "parallel", "generation", "tokenizer")
_MORE_SECTIONS = {"generate": (), "eval": ("eval", "reward"), "training-server": ("train",)}
_KEYS = frozenset(
    ("experiment", "data", "init_from", "plugins", "precision", "device", "train.collective_timeout_minutes")
).union(f"data.{key}" for key in RENDERING_KEYS)
_MAPPINGS = ("data.columns.", "data.chat_template_kwargs.")
# Keys that have no effect, and the option to use instead.
_OPTIONS = {"data.path": "--prompts", "train.seed": "--seed", "algorithm.samples_per_prompt": "--samples-per-prompt"}
_FILTERS = ("temperature", "top_k", "top_p")
_MAX_SEED = 2**63


def prepare_run(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """Return the run with only one stage, which has the model and the tokenizer of `init_from`.

    Keys of the model section that are overridden have the values of the overrides. Overrides without an effect are
    refused.
    """
    keys = [get_override_key(override) for override in options.overrides]
    for override, key in zip(options.overrides, keys, strict=True):
        _refuse_without_effect(override, key, options.command)
    name = list(config.stages)[-1] if options.stage is None else options.stage
    if name not in config.stages:
        raise ConfigError(f"--stage {name}: the run has no such stage{nearest(name, config.stages)}")
    if config.init_from is None:
        raise ConfigError(
            f"init_from is not set, but {options.command} needs trained weights; set init_from to a checkpoint or a "
            "Hugging Face directory"
        )
    stage, weights = config.stages[name], Path(config.init_from)
    model = read_model(weights)
    overridden: dict[str, object] = {
        field.name: getattr(stage.model, field.name)
        for field in fields(ModelConfig)
        if any(key.removeprefix(f"stages.{name}.").startswith(f"model.{field.name}") for key in keys)
    }
    model = replace(model, **overridden)
    check_model(model)
    stage = replace(stage, model=model, tokenizer=replace(stage.tokenizer, path=_find_tokenizer(stage, weights)))
    return replace(config, stages={name: stage})


@dataclass(frozen=True)
class PreparedGeneration:
    """The inputs of `generate`, after all checks that need no torch; `weights` is a checkpoint or an HF directory."""

    stage: StageConfig
    weights: Path
    tokenizer: Tokenizer
    prompts: FilePrompts
    output: CompletionsFile


def prepare(config: RunConfig, options: argparse.Namespace) -> PreparedGeneration:
    """Check the options, paths and prompts of a run from `prepare_run`, and return the inputs of `generate`."""
    if options.samples_per_prompt < 1:
        raise ConfigError(f"--samples-per-prompt {options.samples_per_prompt}: must be at least 1")
    if not 0 <= options.seed < _MAX_SEED:
        raise ConfigError(f"--seed {options.seed}: must be at least 0 and below 2**63")
    stage, weights = config.first, Path(str(config.init_from))
    if options.samples_per_prompt > 1 and (options.greedy or stage.generation.temperature == 0):
        raise ConfigError(
            f"--samples-per-prompt {options.samples_per_prompt}: greedy samples of a prompt are all the same; leave it "
            "out, or sample: leave out --greedy, and set generation.temperature above 0"
        )
    if log.is_main_rank():  # only rank 0 writes to it
        check_output(Path(options.output))
    tokenizer = build_weights_tokenizer(stage)
    identity = check_weights(weights, stage, tokenizer)
    data = build_prompts_config(stage.data, options.prompts)
    data.check(stage)
    prompts = read_prompts(data, tokenizer, stage.model.max_sequence_length, stage.generation.max_new_tokens)
    settings = {
        "weights": identity,
        "precision": stage.precision,
        "tokenizer": tokenizer.digest,
        "prompts": {"number": len(prompts.prompts), "digest": prompts.digest},
        **_describe_sampling(stage, options),
    }
    output = CompletionsFile(Path(options.output), settings)
    if log.is_main_rank():
        output.count_lines()
    return PreparedGeneration(stage, weights, tokenizer, prompts, output)


def generate(config: RunConfig, options: argparse.Namespace) -> int:
    """Write the completions of all prompts for a run from `prepare_run`, and return the exit status."""
    prepared = prepare(config, options)
    from rl_megatron.evaluation.generate import CompletionJob, complete_prompts

    job = CompletionJob(
        prepared.stage, prepared.weights, prepared.tokenizer, prepared.prompts, prepared.output,
        options.samples_per_prompt, options.seed, options.greedy,
    )  # fmt: skip
    return complete_prompts(job)


def _describe_sampling(stage: StageConfig, options: argparse.Namespace) -> dict[str, object]:
    """Return the settings that change the completions of the same prompts and weights. Greedy sampling has no seed."""
    generation = stage.generation
    greedy = options.greedy or generation.temperature == 0
    shared = {key: getattr(generation, key) for key in ("max_new_tokens", "stop_tokens", "stop_strings")}
    if greedy:
        return {"sampling": {"greedy": True, **shared}}
    return {
        "samples_per_prompt": options.samples_per_prompt,
        "seed": options.seed,
        "completions_per_block": COMPLETIONS_PER_BLOCK,
        "sampling": {"greedy": False, **shared, **{key: getattr(generation, key) for key in _FILTERS}},
    }


def _refuse_without_effect(override: str, key: str, command: str) -> None:
    """Refuse an override that has no effect on the command."""
    stage_key = key.split(".", 2)[2] if key.startswith("stages.") and key.count(".") > 1 else key
    if stage_key in _KEYS or stage_key.partition(".")[0] in (*_SECTIONS, *_MORE_SECTIONS[command]):
        return
    if stage_key.startswith(_MAPPINGS):
        return
    has_option = command == "generate" and stage_key in _OPTIONS
    remedy = f"set {_OPTIONS[stage_key]}" if has_option else "leave it out"
    raise ConfigError(f"override {override!r} has no effect on {command}; {remedy}")


def read_model(weights: Path) -> ModelConfig:
    """Return the model section of a checkpoint or of a Hugging Face directory."""
    if not (weights / MANIFEST).is_file() and (weights / "config.json").is_file():
        return read_directory(weights)[1]
    return read_model_section(weights, read_manifest(weights))


def _find_tokenizer(stage: StageConfig, weights: Path) -> str:
    """Return `tokenizer.path` or, if it is not set, the directory of the tokenizer that belongs to the weights."""
    if stage.tokenizer.path is not None:
        return stage.tokenizer.path
    if (weights / "config.json").is_file():
        return str(weights)
    directory = find_imported_tokenizer(weights) or find_run_tokenizer(weights)
    if directory is None:
        raise ConfigError(
            f"init_from={weights} is in no run's output_dir, so its tokenizer is not known; set tokenizer.path to "
            "the tokenizer directory of the run that made the checkpoint"
        )
    return str(directory)


def build_weights_tokenizer(stage: StageConfig) -> Tokenizer:
    """Return the tokenizer of the stage, without special tokens that have no embedding in the model."""
    tokenizer = build_tokenizer(stage)
    if stage.model.vocab_size is not None:
        tokenizer.leave_out_special_tokens_from(stage.model.vocab_size)
    return tokenizer


def check_weights(weights: Path, stage: StageConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """Check that the weights can be read, and return what identifies them: their path, and a digest or sizes."""
    if (weights / MANIFEST).is_file():
        manifest = check_checkpoint(weights, stage.model, tokenizer.digest)
        check_head(weights, manifest, "lm", weights_only=False)
        return {"path": str(weights.resolve()), "step": manifest["step"], "digest": manifest.get("sha256")}
    files = [weights / name for name in find_weight_files(weights)]
    return {"path": str(weights.resolve()), "bytes": {file.name: file.stat().st_size for file in files}}
