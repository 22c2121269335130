"""The section `train`: steps, batches, evaluations and checkpoints of a stage."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
    section,
)
from rl_megatron.config.metrics import HIGHER_IS_BETTER, is_eval_metric


def _check_eval_metric(name: str) -> str:
    """Return `name` if it is an eval metric; the preflight checks whether the stage has that metric."""
    if not is_eval_metric(name):
        choices = ", ".join(map(repr, HIGHER_IS_BETTER))
        raise ValueError(f"must be {choices}, or a statistic of a set of eval.sets, as in 'aime/avg@8'")
    return name


EvalMetric = Annotated[str, AfterValidator(_check_eval_metric)]

_DURATION = re.compile(r"(\d{1,3}):(\d\d):(\d\d):(\d\d)")  # days, hours, minutes, seconds


def parse_duration(duration: str) -> float:
    """Return a duration DD:HH:MM:SS in seconds; raise ValueError if it has another form."""
    parts = _DURATION.fullmatch(duration)
    if parts is None:
        raise ValueError("must be a duration DD:HH:MM:SS, such as 00:03:45:00 for 3 hours and 45 minutes")
    days, hours, minutes, seconds = map(int, parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _check_duration(value: object) -> object:
    if isinstance(value, int):  # YAML reads 10:00:00:00 as a number with the base 60
        raise ValueError('must be a duration "DD:HH:MM:SS" in quotes')
    if isinstance(value, str):
        parse_duration(value)
    return value


Duration = Annotated[str, BeforeValidator(_check_duration)]


@section
class TrainConfig:
    """How a stage trains: its length, its batches, its evaluations and its checkpoints."""

    steps: Positive = 100  # optimizer steps of the stage; for grpo and ppo, rollout steps
    # Sequences per optimizer step over all ranks; a preference pair is two sequences. null: all sequences that a
    # rollout step learns from, so that it has one optimizer step; 32 for algorithms that read data sets.
    global_batch_size: Positive = 32
    # How sequences form microbatches, one per forward pass. padded: micro_batch_size sequences, padded to the longest
    # of the batch. dynamic: sequences of similar length, padded to their longest, up to micro_batch_tokens. packed:
    # sequences one after the other without padding, up to micro_batch_tokens. null: packed for algorithms that sample
    # completions (grpo and ppo), because these differ in length, and padded for others.
    batching: Literal["padded", "dynamic", "packed"] = "padded"
    micro_batch_size: Positive = 8  # sequences per forward pass on one rank; used by batching=padded only
    # Maximum tokens per forward pass on one rank; used by batching=dynamic and packed. Every sequence must fit, and
    # both sequences of a preference pair must fit together.
    micro_batch_tokens: Positive = 4096
    # Compute the common beginnings of sequences once: the prompt of a group's samples, the past of a trajectory's
    # segments, the prompt of a preference pair. auto: where that saves at least 2 % of the step's FLOPs. Sequences that
    # share tokens are packed, whatever batching is.
    share_prefixes: Literal["auto", "off"] = "off"
    # Compute logits from the last hidden states for one block of tokens at a time (a block's logits are 512 MiB in bf16
    # on a GPU, 32 MiB on a CPU). The full logits tensor never exists, and backward recomputes the blocks. Losses
    # that read whole logits do not use it.
    fused_head: bool = False
    # Where the reference policy of dpo, grpo and ppo is kept. resident: on the device, beside the policy. offload: in
    # host memory, and on the device only while it computes.
    reference: Literal["resident", "offload"] = "resident"
    seed: NonNegative = 0  # seed of the initial weights, of generated data, of the data's order and of sampling
    # Compute every sum in a fixed order, so that two runs of the same settings on the same machines are equal to the
    # bit. Operations and engines that cannot do so are refused. All stages must have the same value.
    deterministic: bool = False
    eval_every: NonNegative = 0  # steps between evaluations; 0: only before the first step and after the last
    # Steps between checkpoints; 0: one after the last step, and one whenever save_every_seconds have passed.
    save_every: NonNegative = 0
    # With save_every=0 and no keep_best, a step that ends this long after the last checkpoint, or after the stage's
    # start, is saved; 0: only the last step.
    save_every_seconds: NonNegativeFloat = 1800.0
    async_save: bool = True  # write checkpoints while training continues; a stage still waits for its last one
    keep_checkpoints: Positive = 2  # newest checkpoints kept per stage; older ones are deleted
    # Also export every checkpoint in the format of Hugging Face, to OUTPUT_DIR/exported/STAGE/step-N, while training
    # continues: adapters in peft's format, a reward model as a classifier. An export is deleted with its checkpoint.
    export_hf: bool = False
    # Also keep the best checkpoint by this eval metric, or by a statistic of a set, as in `aime/avg@8`. null: none.
    keep_best: EvalMetric | None = None
    # Eval metrics and their goals, as in {accuracy: 0.9}: the stage ends at the first evaluation that reaches one.
    stop_at: dict[EvalMetric, Annotated[float, Number]] = field(default_factory=dict)
    collective_timeout_minutes: PositiveFloat = 10.0  # how long a rank waits for the others before the run fails
    # What to do if a loss or a gradient norm is NaN or infinite. halt: the run fails. skip: leave out the optimizer
    # step on all ranks. roll_back: go back to the stage's newest checkpoint, and skip the batches since then.
    on_nonfinite: Literal["halt", "skip", "roll_back"] = "halt"
    # Maximum number of optimizer steps skipped in a row, or of roll-backs to the same checkpoint. One more fails the
    # run.
    max_nonfinite_steps: Positive = 5
    # Steps between two desync checks, which compare batches and weights over ranks; 0: only before the first step.
    desync_check_every: NonNegative = 100
    # Number of previous steps whose median loss and reward are compared with the current ones, to warn of a loss spike
    # or a reward collapse; 0: no such warnings.
    anomaly_window: NonNegative = 50
    # A loss spike is this many standard deviations, estimated from the median absolute deviation, above the median.
    loss_spike_deviations: PositiveFloat = 10.0
    # The reward has collapsed if the median of the last five steps is below this share of the earlier steps' median.
    reward_collapse_fraction: Fraction = 0.5
    equal_rewards_steps: Positive = 10  # a warning is logged after this many steps in a row with all rewards equal
    # If a rank is silent, or no rank makes progress, for this long, a report names the rank that hangs, and the stacks
    # of all ranks are written to failure.json; 0: never. The run continues.
    hang_report_seconds: NonNegativeFloat = 300.0
    # The time since the command's start, as DD:HH:MM:SS, by which the last checkpoint must be saved. The run ends after
    # the last step that leaves enough time; the same command continues it. The end of a SLURM job is also a limit.
    checkpoint_must_save_by: Duration | None = None

    @property
    def saves_by_time(self) -> bool:
        """Return whether `save_every_seconds` applies."""
        return self.save_every == 0 and self.keep_best is None and self.save_every_seconds > 0

    @property
    def most_saves(self) -> int:
        """Return how many checkpoints a stage may save."""
        return self.steps if self.saves_by_time else 1 + (self.steps - 1) // (self.save_every or self.steps)

    def check(self, where: str) -> None:
        """Check that a roll-back has checkpoints to return to."""
        if self.on_nonfinite == "roll_back" and not self.save_every:
            raise ConfigError(
                f"{where}.on_nonfinite=roll_back needs checkpoints to go back to, and {where}.save_every=0; set "
                f"{where}.save_every"
            )
