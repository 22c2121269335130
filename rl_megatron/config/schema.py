"""The configuration of a run, one frozen dataclass per YAML section. Field comments are the documentation of the keys.

This module has the run, its stages, and the base classes of the settings of algorithms and data sources. Every other
section is in the module that has its name.

Values are checked on construction, and messages name the key that is unknown, of a wrong type or out of range. Checks
that need two sections are in `stages.py`, and in the `check` methods of algorithms and data sources. Checks that need
the world size are in `topology`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import SerializeAsAny

from rl_megatron.config.data import PROBLEMS, MixedData
from rl_megatron.config.eval_sets import EvalConfig
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.loading.settings import Fraction, Positive, choose_class, section
from rl_megatron.config.loggers import LoggerConfig, ProfileConfig
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.config.tokenizer import TokenizerConfig
from rl_megatron.config.train import TrainConfig

# The settings classes of algorithms by algorithm.name, and of data sources by data.source.
ALGORITHM_CONFIGS: Registry[type[AlgorithmConfig]] = Registry("algorithm")
SOURCE_CONFIGS: Registry[type[DataConfig]] = Registry("data source")
DEFAULT_SHUFFLE_BLOCK = 10_000
USUAL_EVAL_EXAMPLES = 256


@section
class AlgorithmConfig:
    """The settings that every algorithm has. Each algorithm declares a subclass, as in config/algorithms.py.

    Attributes:
        learns_from: The kind of training data, from config/data.py or a data source's own.
        leaves_language_model: Whether the trained weights are a language model, from which a later stage can start.
        has_critic: Whether the algorithm also trains a critic, which doubles the size of checkpoints.
        may_change_on_resume: Keys that may have other values when a run is resumed (runs/rerun.py).
        usual_loss: The loss that a training function of the Python API chooses if its caller names none. If it is None,
            the loss is the default of `algorithm=NAME` (configs/algorithm).
        usual_batching: What `train.batching=null` stands for.
    """

    learns_from: ClassVar[str]
    leaves_language_model: ClassVar[bool] = True
    has_critic: ClassVar[bool] = False
    may_change_on_resume: ClassVar[frozenset[str]] = frozenset()
    usual_loss: ClassVar[str | None] = None
    usual_batching: ClassVar[str] = "padded"

    name: str  # name of a registered algorithm: pretrain, sft, dpo, kto, online_dpo, distillation, grpo, ppo…

    @classmethod
    def usual_batch_size(cls, section: Mapping[str, object]) -> int:
        """Return what `train.global_batch_size=null` stands for.

        Args:
            section: The algorithm's section, which has not been checked.
        """
        return TrainConfig.global_batch_size

    def check(self, stage: StageConfig) -> None:
        """Check the requirements of the algorithm on the other sections of its stage.

        Raises:
            ConfigError: A key contradicts another; the message names both.
        """

    def optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the policy takes, which is the default length of the learning-rate decay."""
        return train.steps


@section
class DataConfig:
    """The data to train and evaluate on. Each data source declares a subclass, as in config/data_sources.py.

    A key that a source does not use must keep its default.

    Attributes:
        provides: The kinds of training data that the source has, of config/data.py or its own.
        heldout_kind: The kind of its held-out data, which decides how a stage is evaluated.
        reads_path: Whether the source needs `path` or `dataset_name`.
        reads_records: Whether it reads files with the package's readers, which the keys from `dataset_name` to
            `columns` configure.
        ignores: Further keys that have no effect on the source.
        has_rewards: Whether its problems come with a reward, so that `reward.functions` may be empty.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    heldout_kind: ClassVar[str]
    reads_path: ClassVar[bool] = True
    reads_records: ClassVar[bool] = False
    ignores: ClassVar[tuple[str, ...]] = ()
    has_rewards: ClassVar[bool] = True

    # Name of a registered data source: text, prompt_answer, preference, prompts, task, or a plugin's. null: task if
    # data.task.name is set, otherwise the source that provides what the algorithm learns from.
    source: str
    # A file (.jsonl, .parquet or text; .gz too), a directory, a pattern such as part-*.parquet, or a list of them. A
    # directory is a Hugging Face data set, or has files named for their splits, such as train.jsonl and test.jsonl, or
    # is read as a whole. With source=task: the task's option path.
    path: str | tuple[str, ...] | None = None
    dataset_name: str | None = None  # a data set of the Hugging Face Hub, instead of path
    subset: str | None = None  # the subset of dataset_name, which the Hub calls its configuration
    # The split to train on, of dataset_name or of a directory. null: train.
    split: str | None = None
    eval_path: str | tuple[str, ...] | None = None  # held-out data, in the forms of path
    # The held-out split, of dataset_name or of a directory. null: test or validation if there is one.
    eval_split: str | None = None
    # Name that rl_megatron uses -> name in the records, as in {question: problem} or {answer:
    # reward_model.ground_truth}.
    columns: dict[str, str] = field(default_factory=dict)
    mix: tuple[MixedData, ...] = ()  # data sets that are mixed in each batch, instead of path and dataset_name
    # A function of the step that returns the weights of mix, in their order or by name, as in curriculum.py:weights.
    # null: those of mix.
    mix_weights: str | None = None
    # Read records block by block while the stage trains, instead of all before the first step.
    streaming: bool = False
    # Number of records in a block, within which records are shuffled; used by streaming only.
    shuffle_block: Positive = DEFAULT_SHUFFLE_BLOCK
    # Directory in which the tokens of large data (from 4 MiB of text) are kept for later runs. null: rl_megatron/tokens
    # in $XDG_CACHE_HOME or ~/.cache. off: they are not kept.
    cache_dir: str | None = None
    # Share of the data that is held out for evaluation if it has no held-out split; unused by task.
    heldout_fraction: Fraction = 0.05
    sequence_length: Positive = 128  # tokens of a pretraining window
    # How records become text. chat: as a conversation, with the tokenizer's chat template. plain: only with the
    # two templates below. auto: chat if records are conversations (`messages`, or lists of messages as `prompt`,
    # `chosen` or `rejected`), otherwise plain.
    format: Literal["auto", "plain", "chat"] = "auto"
    # The prompt, as a Python format string with the fields of a record; with source=task, with {prompt} and the fields
    # of the problem's record. With format=chat it is the user's message. null: the task's own prompt; for other
    # sources, the field that holds the prompt, such as `question`, and in plain text a line break.
    prompt_template: str | None = None
    # The answer, also as a format string. With source=preference, {answer} is the chosen or the rejected text. null:
    # {answer}, or another field that holds the answer, such as `completion`.
    answer_template: str | None = None
    system_prompt: str | None = None  # with format=chat, the system message of conversations without one; null: none
    # The Jinja template of format=chat: a file, or the template itself, which has {{ or {%. null: the tokenizer's.
    chat_template: str | None = None
    # Further variables of the chat template, for example {enable_thinking: false}.
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trained_turns: Literal["all", "last"] = "all"  # with format=chat, the assistant's turns that are trained on
    # What to do with a sequence longer than model.max_sequence_length, or a prompt that leaves too little of it for
    # generation.max_new_tokens. error: stop the run. truncate: cut the end of a sequence, and the beginning of a prompt
    # for generation. drop: leave it out, and a preference pair as a whole.
    too_long: Literal["error", "truncate", "drop"] = "error"
    # Held-out sequences, or problems, per evaluation; a pair is two sequences. If heldout_fraction would hold out
    # fewer, this many are held out. null: 256, or all if fewer are held out.
    num_eval_examples: Positive | None = None
    task: dict[str, Any] = field(default_factory=dict)  # name and options of a registered task, for source=task
    num_documents: Positive = 20_000  # pretraining documents that a task generates
    num_demonstrations: Positive = 1_000  # SFT examples taken from a task

    def check(self, stage: StageConfig) -> None:
        """Check the requirements of the source on the other sections of its stage.

        Raises:
            ConfigError: A key contradicts another; the message names both.
        """


@section
class StageConfig:
    """One stage of a run: an algorithm and every setting that it uses."""

    # An earlier stage whose last weights this stage starts from, as stages.NAME. null: the previous stage.
    init_from: str | None = None
    # the algorithm and its settings (config/algorithms.py)
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], choose_class("name", ALGORITHM_CONFIGS)]
    model: ModelConfig  # the model's architecture; the same in all stages
    parallel: ParallelConfig  # the parallel layout; the same in all stages
    optimizer: OptimizerConfig  # the policy's optimizer
    train: TrainConfig  # steps, batches, evaluations and checkpoints
    tokenizer: TokenizerConfig  # the tokenizer; the same in all stages
    # the data source and its settings (config/data_sources.py)
    data: Annotated[SerializeAsAny[DataConfig], choose_class("source", SOURCE_CONFIGS)]
    generation: GenerationConfig  # sampling and the rollout engine
    peft: LoraConfig | None = None  # adapters to train instead of all weights, as {r: 16}; null: all are trained
    reward: RewardConfig = field(default_factory=RewardConfig)  # reward functions and the processes that run them
    rollout: TrajectoryConfig = field(default_factory=TrajectoryConfig)  # trajectories
    profile: ProfileConfig = field(default_factory=ProfileConfig)  # profiles of chosen steps
    eval: EvalConfig = field(default_factory=EvalConfig)  # named sets of problems to evaluate on
    loss: dict[str, Any]  # name and settings of a registered loss (rl_megatron/losses); pretrain and sft use nll
    precision: Literal["fp32", "bf16"]  # of weights and activations; with bf16, the optimizer keeps fp32 weights
    device: Literal["auto", "cpu", "cuda"]  # auto: one GPU per rank if there are GPUs, otherwise the CPU

    @property
    def runs_programs(self) -> bool:
        """Return whether programs that a model writes are run."""
        rewards = [function.name for function in self.reward.functions]
        return "python" in self.rollout.tools.functions or "code" in rewards

    @property
    def scores_completions(self) -> bool:
        """Return whether the stage samples completions and scores them, for training or evaluation."""
        return bool(self.eval.sets) or PROBLEMS in (self.algorithm.learns_from, self.data.heldout_kind)


@section
class RunConfig:
    """A run: stages in order. Each starts from the weights of the previous stage, or of its `init_from` stage."""

    stages: dict[str, StageConfig]  # stages by name, in order
    # Directory of metrics, checkpoints, the tokenizer and the effective configuration. null: outputs/ and the name of
    # the experiment or, without one, of the algorithm.
    output_dir: str
    plugins: tuple[str, ...] = ()  # the user's own modules that register losses, tasks, algorithms, …
    metric_sinks: tuple[str, ...] = ("jsonl", "tensorboard")  # where metrics are written; jsonl must be listed
    # further services that metrics are sent to, such as W&B (config/loggers.py)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    init_from: str | None = None  # a checkpoint directory whose weights start the first stage; null: new weights
    # Continue the run in output_dir, if there is one. false: move it to output_dir.previous, and start a new run.
    resume: bool = True

    @property
    def first(self) -> StageConfig:
        """Return the first stage."""
        return next(iter(self.stages.values()))
