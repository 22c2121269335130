"""Train from a script or a notebook: `grpo`, `sft`, `dpo`, and `train` for every algorithm."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.api.model import StartingModel
from rl_megatron.api.records import Data, take_records, write_records
from rl_megatron.api.settings import Reward, run_config
from rl_megatron.cli.early_checks import check_early, check_layout
from rl_megatron.config.schema import RunConfig

_METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training function, the same on every rank.

    Attributes:
        output_dir: The run's directory, with metrics, checkpoints and the effective configuration.
        checkpoint: The last checkpoint. `rl-megatron convert export` makes a Hugging Face directory of it.
        metrics: The eval metrics after the last step, by name.
        history: The lines of metrics.jsonl: one for each step, and one for each evaluation.
    """

    output_dir: Path
    checkpoint: Path
    metrics: dict[str, float]
    history: list[dict[str, Any]] = field(repr=False)


def train(
    algorithm: str,
    /,
    *,
    output_dir: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    data: Data | None = None,
    rewards: Sequence[Reward] | Reward = (),
    **settings: Any,
) -> TrainingResult:
    """Train a model in this process, or on all ranks of torchrun, as `rl-megatron train algorithm=…` does.

    A run in the same `output_dir` continues from its newest checkpoint.

    Args:
        algorithm: The name of a registered algorithm, such as "sft", "grpo" or a plugin's.
        output_dir: The directory of metrics, checkpoints and the effective configuration.
        model: A checkpoint, or a Hugging Face directory, which is imported once into `OUTPUT_DIR.imported`. None: new
            weights for the model that the section `model` describes.
        data: A file, a directory, a pattern or a list of these (`data.path`); records, as a list of dictionaries or a
            `datasets.Dataset`, which are written to `OUTPUT_DIR.data`; or a mapping with keys of the section `data`, as
            in `{"dataset_name": "my/data", "split": "train"}` or `{"path": records, "eval_path": others}`.
        rewards: A reward function, or a list of them, whose weighted sum is the reward. Each is a Python function, the
            name of a registered one such as "math_verify", an import string such as "my_rewards.py:length", or a
            mapping with the keys of an entry of `reward.functions`, as in `{"name": my_function, "weight": 0.1}`.
        **settings: Any keys of the configuration, as sections (`train={"steps": 50}`) or as paths
            (`**{"train.steps": 50}`). The name of a preset chooses one: `loss="clipped_pg"`.

    Raises:
        ConfigError: The input is wrong; the message names the key, the value, the rule and the remedy.
        RuntimeError: The run failed; the message has the cause, and names the newest checkpoint.
    """
    log.setup()
    begin = None if model is None else StartingModel.find(model, Path(output_dir))
    location, files = take_records(data, Path(output_dir))
    config = run_config(algorithm, begin, location, rewards, output_dir, settings)
    if not _has_process_group():  # a group of the caller's has its own number of ranks
        check_layout(config)
    write_records(files)
    if "RANK" not in os.environ:  # several ranks must agree on errors, so their preflight makes these checks
        check_early(config)
    if begin is not None and begin.checkpoint is None:
        begin = StartingModel(begin.source, begin.import_into(Path(output_dir), config.first.device))
        config = run_config(algorithm, begin, location, rewards, output_dir, settings)
    return _run(config)


def grpo(
    model: str | os.PathLike[str],
    data: Data | None = None,
    rewards: Sequence[Reward] | Reward = (),
    *,
    output_dir: str | os.PathLike[str],
    **settings: Any,
) -> TrainingResult:
    """Train a language model by GRPO on prompts, with reward functions. The arguments are those of `train`.

    These are the settings that most calls choose, with common values for a model of some billion parameters:

        algorithm={"prompts_per_step": 32, "samples_per_prompt": 8},
        generation={"max_new_tokens": 512, "temperature": 1.0},
        optimizer={"lr": 1e-6},
        loss={"ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.0},
        train={"steps": 200, "global_batch_size": 256, "micro_batch_tokens": 8192, "eval_every": 20},
        parallel={"tensor": 2},
        precision="bf16",

    docs/reference/configuration.md describes all settings, and docs/losses.md those of DAPO, GSPO and other methods.
    """
    return train("grpo", model=model, data=data, rewards=rewards, output_dir=output_dir, **settings)


def sft(
    model: str | os.PathLike[str],
    data: Data | None = None,
    *,
    output_dir: str | os.PathLike[str],
    **settings: Any,
) -> TrainingResult:
    """Train a language model on prompts with answers, or on conversations. The arguments are those of `train`."""
    return train("sft", model=model, data=data, output_dir=output_dir, **settings)


def dpo(
    model: str | os.PathLike[str],
    data: Data | None = None,
    *,
    output_dir: str | os.PathLike[str],
    **settings: Any,
) -> TrainingResult:
    """Train a language model by DPO on preference pairs. The arguments are those of `train`."""
    return train("dpo", model=model, data=data, output_dir=output_dir, **settings)


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _run(config: RunConfig) -> TrainingResult:
    import torch.distributed as dist

    from rl_megatron.runs.run import run_stages
    from rl_megatron.topology.ranks import leave_together
    from rl_megatron.topology.topology import leave

    was_initialized = dist.is_initialized()
    try:
        results = run_stages(config)
    except Exception:
        leave_together()
        raise
    finally:
        # With several ranks the process group stays: a second would find the first's addresses in torchrun's store.
        if not was_initialized and dist.is_initialized() and dist.get_world_size() == 1:
            leave()
    output_dir = Path(config.output_dir)
    *_, metrics = results.summary["stages"].values()
    history = [json.loads(line) for line in (output_dir / _METRICS).read_text("utf-8").splitlines()]
    return TrainingResult(output_dir, results.checkpoint, metrics, history)
