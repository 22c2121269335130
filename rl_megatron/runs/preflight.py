"""Check a run's input before its first step: settings, data, tokenizer, losses and checkpoints of all stages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rl_megatron import log
from rl_megatron.algorithms.registry import eval_metric_names, get_algorithm
from rl_megatron.batching.packing import round_up
from rl_megatron.checkpoint.adapters import check_same_adapter, find_base, holds_adapter, read_adapter_configs
from rl_megatron.checkpoint.directory import (
    Damaged,
    check_checkpoint,
    check_head,
    check_output_dir,
    find_checkpoints,
    read_manifest,
)
from rl_megatron.checkpoint.exports import check_exports
from rl_megatron.config.data_sources import require_place
from rl_megatron.config.engines import refuse_several
from rl_megatron.config.errors import ConfigError, convert_errors
from rl_megatron.config.eval_sets import EvalSetConfig
from rl_megatron.config.loading.import_strings import is_import_string
from rl_megatron.config.loggers import check_loggers
from rl_megatron.config.peft import LoraConfig, check_together
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.config.stages import find_previous_stage
from rl_megatron.data.run_tokenizer import get_run_tokenizer
from rl_megatron.data.same_prompts import find_different_prompts
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.evaluation.heldout import build_evaluation
from rl_megatron.evaluation.sets import list_set_metric_names
from rl_megatron.generation.engines import check_engine
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.losses.foreign import as_loss, check_call
from rl_megatron.losses.registry import configured_loss
from rl_megatron.model.lora.targets import find_adapted_linears
from rl_megatron.observability.sinks import check_sinks
from rl_megatron.rewards.loading import check_rewards
from rl_megatron.rewards.reward_models import check_reward_models
from rl_megatron.rollouts.build import check_worker
from rl_megatron.runs import verify
from rl_megatron.runs.checkpointer import critic_checkpoints
from rl_megatron.runs.rerun import check_replays, refuse_changes
from rl_megatron.topology.degrees import sequence_multiple, zigzag_slices
from rl_megatron.workers.confinement import log_missing_limits


def check(config: RunConfig, output_dir: Path) -> Tokenizer:
    """Check the input of all stages, and return the run's tokenizer.

    It runs before anything is written. Every rank checks the same and gets the same result. `output_dir` is the result
    of `rerun.find_earlier_run`, and need not exist. A ConfigError names the key or file, the value, the rule and the
    remedy.
    """
    check_output_dir(Path(config.output_dir))
    check_sinks(config.metric_sinks)
    check_loggers(config.logger)
    refuse_changes(config)
    check_replays(config)
    for stage in config.stages.values():
        require_place(stage.data)
    tokenizer = convert_errors(lambda: get_run_tokenizer(config.first, output_dir))
    check_vocabulary(config.first.model, tokenizer.vocab_size)
    for name, stage in config.stages.items():
        convert_errors(lambda stage=stage: _check_data_and_tokenizer(stage, tokenizer))
        saved = find_checkpoints(output_dir / "checkpoints" / name)
        if saved:
            try:
                check_saved(saved[-1], stage, tokenizer)
            except Damaged as error:
                raise verify.add_remedy(error, saved[-1], config, read_manifest) from error
    _check_adapters(config, tokenizer)
    for stage in config.stages.values():
        check_exports(
            stage.train, stage.model, head=get_algorithm(stage).head, precision=stage.precision,
            is_adapter=stage.peft is not None, tokenizer=tokenizer, output_dir=Path(config.output_dir),
            init_from=Path(config.init_from) if config.init_from else None,
        )  # fmt: skip
    for message in find_different_prompts(config.stages, tokenizer):
        log.LOGGER.warning(message)
    if any(stage.runs_programs for stage in config.stages.values()):
        log_missing_limits()
    if config.init_from:
        path = Path(config.init_from)
        manifest = check_checkpoint(path, config.first.model, tokenizer.digest)
        check_head(path, manifest, get_algorithm(config.first).head, weights_only=True)
    return tokenizer


def _check_adapters(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that every stage's adapters fit the model, and that the stage has weights to adapt."""
    size = config.first.model.vocab_size or tokenizer.vocab_size
    initial = _read_adapters(config.init_from, config.first.peft)
    adapters_after: dict[str, dict[str, LoraConfig]] = {}  # the adapters that exist after each stage, by name
    for name, stage in config.stages.items():
        where = f"stages.{name}.peft" if len(config.stages) > 1 else "peft"
        previous = find_previous_stage(config.stages, name)
        adapters = initial if previous is None else adapters_after[previous]
        adapters_after[name] = {}
        if stage.peft is None:
            continue
        find_adapted_linears(stage.peft, stage.model, size)
        if previous is None and not config.init_from:
            raise ConfigError(
                f"{where} is set, but the stage has no weights to adapt; set init_from, or train all weights in a "
                "stage before it"
            )
        adapter = stage.peft.adapter_name
        if previous is not None and adapters.get(adapter, stage.peft) != stage.peft:
            raise ConfigError(
                f"{where} differs from that of an earlier stage, whose adapter {adapter} it continues; use the same "
                f"keys, or give the new adapter another name with {where}.adapter_name"
            )
        adapters_after[name] = adapters | {adapter: stage.peft}
        check_together([*adapters_after[name].values()])
        if stage.generation.refit == "adapter":
            refuse_several([*adapters_after[name].values()])


def _read_adapters(init_from: str | None, peft: LoraConfig | None) -> dict[str, LoraConfig]:
    """Return the adapters of the checkpoint that a run starts from, by name, after checking them.

    Their base must be readable, and the section `peft` must match the adapter that it continues, if any.
    """
    manifest = read_manifest(Path(init_from)) if init_from else {}
    if not init_from or not holds_adapter(manifest):
        return {}
    path = Path(init_from)
    find_base(path, manifest)
    adapters = read_adapter_configs(path, manifest)
    if peft is not None and peft.adapter_name in adapters:
        check_same_adapter(path, adapters[peft.adapter_name], peft)
    return adapters


def check_saved(newest: Path, stage: StageConfig, tokenizer: Tokenizer) -> None:
    """Check a stage's newest checkpoint and, if steps are left, its critic's checkpoint."""
    manifest = check_checkpoint(newest, stage.model, tokenizer.digest)
    if manifest["step"] < stage.train.steps and get_algorithm(stage).critic is not None:
        check_checkpoint(critic_checkpoints(newest.parent) / newest.name, stage.model, tokenizer.digest)


def _check_data_and_tokenizer(stage: StageConfig, tokenizer: Tokenizer) -> None:
    """Check a stage's loss, eval metrics, sampling, engine, rewards, training data and held-out data."""
    check_loss(stage)
    set_metrics = list_set_metric_names(stage, tokenizer)
    check_keep_best(stage, set_metrics)
    _check_goals(stage, (*eval_metric_names(stage), *set_metrics))
    make_sampling(stage, tokenizer)
    check_engine(stage, tokenizer.vocab_size)
    check_worker(stage, tokenizer, loads=int(os.environ.get("RANK", "0")) == 0)  # the rank that runs the worker
    check_reward_models(stage, tokenizer)
    check_rewards(stage, loads=int(os.environ.get("LOCAL_RANK", "0")) == 0)  # the rank that runs the functions
    check_budget(stage, get_algorithm(stage).check_data(stage, tokenizer))
    check_budget(stage, build_evaluation(stage, tokenizer).item_lengths())


def check_keep_best(stage: StageConfig, set_metrics: Mapping[str, EvalSetConfig] = MappingProxyType({})) -> None:
    """Check that `train.keep_best` is an eval metric of the stage, and that every checkpoint is evaluated.

    `set_metrics` maps each metric of a named set to that set.
    """
    train, names = stage.train, (*eval_metric_names(stage), *set_metrics)
    if train.keep_best is None:
        return
    if train.keep_best not in names:
        raise ConfigError(
            f"train.keep_best={train.keep_best} is not an eval metric of {stage.algorithm.name} on "
            f"data.source={stage.data.source}; set it to one of {', '.join(names)}, or to null"
        )
    set_every = set_metrics[train.keep_best].every if train.keep_best in set_metrics else None
    key, every = ("train.eval_every", train.eval_every) if set_every is None else ("the set's every", set_every)
    if train.save_every and (not every or train.save_every % every):
        raise ConfigError(
            f"train.keep_best={train.keep_best} needs an evaluation of every checkpoint, and train.save_every="
            f"{train.save_every} is not a multiple of {key}={every}; set both to the same value"
        )


def _check_goals(stage: StageConfig, names: Sequence[str]) -> None:
    """Check that the keys of `train.stop_at` are eval metrics of the stage."""
    for name in stage.train.stop_at:
        if name not in names:
            raise ConfigError(
                f"train.stop_at has {name}, which is not an eval metric of {stage.algorithm.name} on "
                f"data.source={stage.data.source}; set it to some of {', '.join(names)}"
            )


def check_budget(stage: StageConfig, items: Iterable[Sequence[int]]) -> None:
    """Check that every item fits a dynamic or packed microbatch of `train.micro_batch_tokens`.

    `items` has, for each item (a sequence or a pair), the number of tokens of each of its sequences.
    """
    train, parallel = stage.train, stage.parallel
    items = list(items)
    if train.batching == "padded" or not items:
        return
    multiple, num_slices = sequence_multiple(parallel), zigzag_slices(parallel.context)

    def count_slots(item: Sequence[int]) -> int:
        if train.batching == "packed":
            return round_up(sum(round_up(length, num_slices) for length in item), multiple)
        return len(item) * round_up(max(item), multiple)

    largest = max(items, key=count_slots)
    if count_slots(largest) > train.micro_batch_tokens // multiple * multiple:
        what = "sequence" if len(largest) == 1 else "pair of sequences"
        padded = f", padded to multiples of {multiple} for the layout" if multiple > 1 else ""
        raise ConfigError(
            f"train.micro_batch_tokens={train.micro_batch_tokens} does not hold the largest {what}: "
            f"{' + '.join(map(str, largest))} tokens{padded}; raise it to at least {count_slots(largest)}, or shorten "
            "the sequences"
        )


def check_loss(stage: StageConfig) -> None:
    """Check that the loss section names a loss, has valid keys, and fits the stage's algorithm."""
    algorithm, needs, name = stage.algorithm.name, get_algorithm(stage).loss, stage.loss.get("name")
    if needs is None:
        return  # the algorithm has a fixed loss
    if name is None:
        raise ConfigError(f"loss.name is not set, and {algorithm} needs a loss; set it to {needs.choices}")
    try:
        loss_fn = configured_loss(stage.loss)
        check_call(as_loss(loss_fn))  # raises if no policy can run the loss
    except ConfigError:
        raise
    except Exception as error:  # an unknown key, a wrong type, a value out of range, or whatever a user's loss raises
        where = f"loss.name={name}" if is_import_string(name) else "loss"
        raise ConfigError(f"{where}: {error.args[0] if error.args else error}") from error
    if not needs.suits(loss_fn):
        raise ConfigError(
            f"loss.name={name} does not use {needs.uses}, so {algorithm} cannot learn with it; set loss to "
            f"{needs.choices}"
        )
    missing = sorted(set(getattr(loss_fn, "required_keys", ())) - needs.batch_keys)
    if missing:
        raise ConfigError(
            f"loss.name={name} needs {missing}, which {algorithm}'s batches do not have; set loss to {needs.choices}"
        )
