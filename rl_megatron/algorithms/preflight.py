"""Everything about a run's input that can be known to be wrong before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rl_megatron.algorithms import inputs, verify
from rl_megatron.algorithms.checkpointer import critic_checkpoints
from rl_megatron.algorithms.evaluate import heldout_measures
from rl_megatron.algorithms.rollout import ROLLOUT_KEYS, needs_reference
from rl_megatron.batching.packing import round_up
from rl_megatron.checkpoint.directory import Damaged, check_head, complete_checkpoints, read_manifest
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import from_yaml, to_yaml
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.data.order import BatchSchedule
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.transformers.engine import engine_devices
from rl_megatron.losses.contract import LossFunction, LossInputType
from rl_megatron.losses.registry import configured_loss
from rl_megatron.model.build import check_vocabulary
from rl_megatron.model.families import family_of_model
from rl_megatron.topology.context_parallel import zigzag_chunks
from rl_megatron.topology.device import choose_device
from rl_megatron.topology.topology import sequence_multiple

# Sections that a run may not change between its start and its end. Others may: layout, steps, learning rate, …
_OF_THE_TRAINED = ("algorithm", "model", "tokenizer", "loss", "precision")
# Of the algorithm's: the critic's optimizer, as the policy's may, and where reference logprobs come from.
_MAY_CHANGE = ("critic_optimizer", "precompute_reference")
_T = TypeVar("_T")


def check(config: RunConfig, output_dir: Path) -> Tokenizer:
    """The run's tokenizer, after everything that can be wrong with the input of any stage was looked for: before the
    first step of the first stage, and before anything is written. Every rank checks, and finds, the same.

    Raises: ConfigError naming the key or file, the value, the rule and the remedy.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"output_dir={output_dir} is a file; choose a directory")
    tokenizer = _bad_input_named(lambda: inputs.run_tokenizer(config.first, output_dir))
    if config.first.model.vocab_size is not None:
        tokenizer.leave_out_special_tokens_from(config.first.model.vocab_size)
    check_vocabulary(config.first.model, tokenizer.vocab_size)
    for name, stage in config.stages.items():
        _bad_input_named(lambda stage=stage: _build_inputs(stage, tokenizer))
        saved = complete_checkpoints(output_dir / "checkpoints" / name)
        if saved and not config.resume:
            raise ConfigError(
                f"resume=false and output_dir={output_dir} holds checkpoints of stage {name!r}; "
                "choose another output_dir, or resume=true to continue"
            )
        if saved:
            try:
                _check_saved(saved[-1], stage, tokenizer, weights_source(config, output_dir, name))
            except Damaged as error:
                raise verify.with_remedy(error, saved[-1], config, read_manifest) from error
    _check_unchanged(config, output_dir)
    if config.init_from:
        path = Path(config.init_from)
        _check_checkpoint(path, config.first, tokenizer)
        needed = "score" if config.first.algorithm.name == "reward_model" else "lm"
        check_head(path, read_manifest(path), needed, weights_only=True)
    return tokenizer


def weights_source(config: RunConfig, output_dir: Path, name: str) -> str:
    """Where the stage `name` begins, once the stages before it are done: init_from, a step of the stage before, or
    new weights."""
    names = list(config.stages)
    if name != names[0]:
        before = names[names.index(name) - 1]
        saved = complete_checkpoints(output_dir / "checkpoints" / before)
        newest = read_manifest(saved[-1])["step"] if saved else 0
        step = max(newest, config.stages[before].train.steps)
        return f"step {step} of stage {before!r} (stages.{before}.train.steps)"
    if config.init_from:
        return f"init_from={Path(config.init_from).resolve()}"  # one directory, however it is written
    return f"init_from=null, new weights of train.seed={config.first.train.seed}"


def _check_saved(newest: Path, stage: StageConfig, tokenizer: Tokenizer, weights_from: str) -> None:
    """A stage's newest checkpoint and, where steps are left to take, what else they need."""
    manifest = _check_checkpoint(newest, stage, tokenizer)
    if manifest["step"] >= stage.train.steps:
        return
    if stage.algorithm.name == "ppo":
        _check_checkpoint(critic_checkpoints(newest.parent) / newest.name, stage, tokenizer)
    began_with = manifest.get("weights_from", weights_from)
    if began_with != weights_from and _compares_with_reference(stage):
        raise ConfigError(
            f"checkpoint {newest} is of a stage whose reference policy was {began_with}, and would now be "
            f"{weights_from}: a stage keeps its reference from its first step to its last; set it back, or choose "
            "another output_dir and start from this checkpoint with init_from"
        )


def _compares_with_reference(stage: StageConfig) -> bool:
    if stage.algorithm.name in ("grpo", "ppo"):
        return needs_reference(configured_loss(stage.loss))
    return stage.algorithm.name == "dpo"


def _check_checkpoint(path: Path, stage: StageConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest of a checkpoint that the stage can read."""
    manifest = read_manifest(path, stage.model)
    if manifest.get("tokenizer", tokenizer.digest) != tokenizer.digest:
        raise ConfigError(
            f"checkpoint {path} was trained with another tokenizer than this run's, so the same text would be other "
            "tokens to it; set tokenizer.path to the tokenizer directory of the run that made it"
        )
    return manifest


def _build_inputs(stage: StageConfig, tokenizer: Tokenizer) -> None:
    train = stage.train
    _check_keep_best(stage)
    inputs.sampling(stage, tokenizer)
    task = inputs.stage_task(stage)
    _check_engine(stage, tokenizer)
    check_loss(stage)
    if stage.algorithm.name in ("grpo", "ppo"):
        problems = inputs.training_problems(stage, task)
        items = [(inputs.check_room(stage, problems, tokenizer),)]
        if len(problems) < stage.algorithm.prompts_per_step:
            raise ConfigError(
                f"algorithm.prompts_per_step={stage.algorithm.prompts_per_step} exceeds the {len(problems)} training "
                "problems; lower it or provide more data"
            )
    elif stage.data.source == "preference":
        pairs = inputs.preference_rows(stage, tokenizer)
        _check_enough_pairs(stage, len(pairs))
        items = pairs.item_lengths()
    else:
        pretraining = stage.algorithm.name == "pretrain"
        rows = (inputs.pretraining_rows if pretraining else inputs.answer_rows)(stage, tokenizer)
        BatchSchedule(len(rows), train.global_batch_size, train.seed)
        items = rows.item_lengths()
    _check_budget(stage, items)
    if task is not None:
        inputs.check_room(stage, inputs.heldout_problems(stage, task, tokenizer).problems, tokenizer)
    elif stage.data.source == "preference":
        _check_budget(stage, inputs.heldout_pairs(stage, tokenizer).batch["input_lengths"].view(-1, 2).tolist())
    else:
        _check_budget(stage, inputs.heldout_text(stage, tokenizer).batch["input_lengths"].view(-1, 1).tolist())


def _check_keep_best(stage: StageConfig) -> None:
    """The best checkpoint is known where every checkpoint is measured, by a measure that its data gives."""
    train, given = stage.train, heldout_measures(stage)
    if train.keep_best is None:
        return
    if train.keep_best not in given:
        raise ConfigError(
            f"train.keep_best={train.keep_best} is not measured by {stage.algorithm.name} on "
            f"data.source={stage.data.source}; set it to one of {', '.join(given)}, or to null"
        )
    if train.save_every and (not train.eval_every or train.save_every % train.eval_every):
        raise ConfigError(
            f"train.keep_best={train.keep_best} needs an evaluation of every checkpoint, and train.save_every="
            f"{train.save_every} is no multiple of train.eval_every={train.eval_every}; set both alike"
        )


def _check_engine(stage: StageConfig, tokenizer: Tokenizer) -> None:
    """A Hugging Face engine needs devices that are there, and a model that Hugging Face knows."""
    if stage.generation.engine != "transformers":
        return
    engine_devices(stage.generation, choose_device(stage.device))
    try:
        family_of_model(stage.model, stage.model.vocab_size or tokenizer.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"generation.engine=transformers: {error}; set generation.engine=megatron") from error


def _check_budget(stage: StageConfig, items: Iterable[Sequence[int]]) -> None:
    """Every item (a row, or the two of a pair), of so many tokens each, must fit a microbatch that goes by tokens."""
    train, parallel = stage.train, stage.parallel
    if train.batching == "padded":
        return
    multiple, chunks = sequence_multiple(parallel), zigzag_chunks(parallel.context)

    def needed(item: Sequence[int]) -> int:
        if train.batching == "packed":
            return round_up(sum(round_up(length, chunks) for length in item), multiple)
        return len(item) * round_up(max(item), multiple)

    largest = max(items, key=needed)
    if needed(largest) > train.micro_batch_tokens // multiple * multiple:
        what = "row" if len(largest) == 1 else "pair of rows"
        padded = f", padded to multiples of {multiple} for the layout" if multiple > 1 else ""
        raise ConfigError(
            f"train.micro_batch_tokens={train.micro_batch_tokens} does not hold the largest {what}: "
            f"{' + '.join(map(str, largest))} tokens{padded}; raise it to {needed(largest)} at least, or shorten rows"
        )


def _check_enough_pairs(stage: StageConfig, num_pairs: int) -> None:
    rows = stage.train.global_batch_size
    if rows > 2 * num_pairs:
        raise ConfigError(
            f"train.global_batch_size={rows} is {rows // 2} pairs of two rows, and data.path={stage.data.path} has "
            f"{num_pairs} to train on; lower it or provide more data"
        )


def check_loss(stage: StageConfig) -> None:
    """The loss section against what the stage's algorithm gives a loss, and wants from it."""
    algorithm, name = stage.algorithm, stage.loss.get("name")
    if algorithm.name not in _LOSS_MAKES_USE_OF:
        return  # pretraining and fine-tuning have one loss
    suits, what, keys, instead = _LOSS_MAKES_USE_OF[algorithm.name]
    if name is None:
        raise ConfigError(f"loss.name is not set, and {algorithm.name} learns by a loss; set it: {instead}")
    try:
        loss_fn = configured_loss(stage.loss)
    except (KeyError, TypeError, ValueError) as error:  # an unknown key, a wrong type, a value out of range
        raise ConfigError(f"loss: {error.args[0] if error.args else error}") from error
    if not suits(loss_fn):
        raise ConfigError(f"loss.name={name} uses no {what}, which is all {algorithm.name} learns from; use {instead}")
    missing = sorted(set(getattr(loss_fn, "required_keys", ())) - keys)
    if missing:
        raise ConfigError(f"loss.name={name} needs {missing}, which {algorithm.name}'s batches do not carry")
    group_relative = getattr(algorithm, "advantage_estimator", None) == "group_relative"
    if group_relative and stage.loss.get("use_kl_in_reward"):
        raise ConfigError(
            "loss.use_kl_in_reward=true: advantages relative to a group leave rewards as they are; set it to false, or "
            "algorithm.advantage_estimator=reinforce_plus_plus"
        )


def _has_advantages(loss_fn: LossFunction) -> bool:
    return "advantages" in getattr(loss_fn, "required_keys", ("advantages",))  # one that does not say may well


def _takes_pairs(of: LossInputType) -> Callable[[LossFunction], bool]:
    return lambda loss_fn: getattr(loss_fn, "group_size", 1) == 2 and loss_fn.input_type is of


_PAIR_KEYS = frozenset({"input_ids", "input_lengths", "token_mask", "sample_mask"})
# Of each algorithm: whether a loss suits it, what such a loss uses, what batches carry, and a loss that suits.
_LOSS_MAKES_USE_OF = {
    "grpo": (_has_advantages, "advantages", ROLLOUT_KEYS, "clipped_pg"),
    "ppo": (_has_advantages, "advantages", ROLLOUT_KEYS, "clipped_pg"),
    "dpo": (
        _takes_pairs(LossInputType.LOGPROB),
        "logprobs of pairs",
        _PAIR_KEYS | {"reference_policy_logprobs"},
        "dpo or ipo",
    ),
    "reward_model": (_takes_pairs(LossInputType.LOGIT), "scores of pairs", _PAIR_KEYS, "preference"),
}


def _check_unchanged(config: RunConfig, output_dir: Path) -> None:
    """A run that goes on must be the run that began: what its checkpoints were trained on may not change under them."""
    path = output_dir / "config.yaml"
    if not path.is_file():
        return
    before, now = (yaml.safe_load(to_yaml(each)) for each in (from_yaml(path.read_text(), str(path)), config))
    for name in now["stages"]:
        if not complete_checkpoints(output_dir / "checkpoints" / name):
            continue
        was, is_ = (_of_the_trained(stages.get(name, {})) for stages in (before["stages"], now["stages"]))
        changed = [f"{section}: {was[section]} → {is_[section]}" for section in is_ if was[section] != is_[section]]
        if changed:
            raise ConfigError(
                f"output_dir={output_dir} holds checkpoints of stage {name!r} under another configuration "
                f"({'; '.join(changed)}); set it back, or choose another output_dir and start from them with init_from"
            )


def _of_the_trained(stage: Mapping[str, Any]) -> dict[str, Any]:
    sections = {section: stage.get(section) for section in _OF_THE_TRAINED}
    sections["algorithm"] = {k: v for k, v in (sections["algorithm"] or {}).items() if k not in _MAY_CHANGE}
    return sections


def _bad_input_named(build: Callable[[], _T]) -> _T:
    """What the data and task rooms refuse, and files that cannot be read, become the error that users read."""
    try:
        return build()
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
