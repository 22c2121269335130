"""The configuration, one frozen dataclass per YAML section. Field comments are the documentation of the keys.

Values are checked on construction, and messages name the key that is unknown, of a wrong type or out of range. Checks
that need two sections are in `stages.py`, and in the `check` methods of algorithms and data sources. Checks that need
the world size are in `topology`.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from rl_megatron.config.data_kinds import PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.eval_metrics import HIGHER_IS_BETTER
from rl_megatron.config.field_types import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    section,
)
from rl_megatron.config.named_class import named_class
from rl_megatron.config.registry import Registry
from rl_megatron.config.rewards import RewardConfig

if TYPE_CHECKING:
    EvalMetric = str  # the names are not known to a type checker
else:
    EvalMetric = Literal[tuple(HIGHER_IS_BETTER)]

# The settings classes of algorithms by algorithm.name, and of data sources by data.source.
ALGORITHM_CONFIGS: Registry[type[AlgorithmConfig]] = Registry("algorithm")
SOURCE_CONFIGS: Registry[type[DataConfig]] = Registry("data source")


@section
class LinearRope:
    """Linear RoPE scaling: every frequency is divided by `factor` (Gemma 3)."""

    kind: Literal["linear"] = "linear"  # selects linear scaling
    factor: PositiveFloat  # the divisor of every frequency; 8 stretches the context to eight times its length


@section
class Llama3Rope:
    """RoPE scaling of Llama 3.1 and later.

    Low frequencies are divided by `factor`, high frequencies are unchanged, and those between are interpolated.
    """

    kind: Literal["llama3"] = "llama3"  # selects the scaling of Llama 3.1
    factor: PositiveFloat  # the divisor of low frequencies
    low_freq_factor: PositiveFloat = 1.0  # low frequencies turn at most this many times in the original context
    high_freq_factor: PositiveFloat = 4.0  # high frequencies turn at least this many times in the original context
    original_max_position_embeddings: Positive  # the original context length, in tokens


@section
class YarnRope:
    """YaRN RoPE scaling: each frequency is scaled by how often it turns within the original context (DeepSeek, Qwen).

    Source: Peng et al. 2023 (arXiv:2309.00071).
    """

    kind: Literal["yarn"] = "yarn"  # selects YaRN
    factor: PositiveFloat  # the divisor of low frequencies
    original_max_position_embeddings: Positive  # the original context length, in tokens
    beta_fast: PositiveFloat = 32.0  # frequencies with at least this many turns in that length are unchanged
    beta_slow: PositiveFloat = 1.0  # frequencies with at most this many turns in that length are divided by factor
    truncate: bool = True  # true: round the two bounds between these frequencies to whole dimensions
    # Rotated queries and keys are multiplied by (0.1·mscale·ln(factor) + 1) / (0.1·mscale_all_dim·ln(factor) + 1). If
    # one of the two is null: by 0.1·ln(factor) + 1.
    mscale: PositiveFloat | None = None
    # Second coefficient of the formula of mscale. With kv_lora_rank, attention scores are also multiplied by
    # (0.1·mscale_all_dim·ln(factor) + 1)². null: they are not.
    mscale_all_dim: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None  # replaces the factor that follows from mscale; null: use mscale


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope, Field(discriminator="kind")]


@section
class ModelConfig:
    """A decoder like LLaMA: RMSNorm, gated MLP, RoPE, grouped-query attention; dense, or a mixture of experts."""

    num_layers: Positive = 4  # transformer layers
    hidden_size: Positive = 128  # width of the hidden states
    ffn_hidden_size: Positive = 384  # inner width of a dense MLP
    num_attention_heads: Positive = 4  # query heads
    num_query_groups: Positive = 4  # key/value heads; equal to num_attention_heads for plain multi-head attention
    head_dim: Positive | None = None  # dimensions of an attention head; null: hidden_size / num_attention_heads
    max_sequence_length: Positive = 256  # the longest sequence, in tokens, prompt and completion together
    vocab_size: Positive | None = None  # rows of the embedding; null: one for each of the tokenizer's tokens
    rope_base: PositiveFloat = 10_000.0  # base θ of the RoPE frequencies
    rope_scaling: RopeScaling | None = None  # stretches RoPE to longer contexts: kind linear, llama3 or yarn; null: off
    local_rope_base: PositiveFloat | None = None  # RoPE base of windowed layers, unscaled (Gemma 3); null: rope_base
    norm_epsilon: PositiveFloat = 1e-5  # added to the mean square in every RMSNorm
    zero_centered_norm: bool = False  # norms multiply by 1 + weight instead of weight (Gemma)
    sandwich_norms: bool = False  # also normalise what attention and MLP add to the residual (Gemma 2 and 3)
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the MLP's gate; Gemma uses gelu_tanh
    scale_embeddings: bool = False  # multiply embeddings by √hidden_size (Gemma)
    tie_embeddings: bool = True  # use the embedding matrix as the output head
    qkv_bias: bool = False  # add a bias to query, key and value projections (Qwen2)
    qk_norm: bool = False  # apply RMSNorm to each head's queries and keys (Qwen3)
    query_pre_attn_scalar: Positive | None = None  # scores are divided by its root (Gemma); null: dimensions of a head
    init_std: PositiveFloat = 0.02  # standard deviation of the initial weights
    sliding_window: Positive | None = None  # tokens that a token attends to, itself included; null: all before it
    global_attention_every: Positive | None = None  # every n-th layer has no window (Gemma 3: 6); null: all have it
    # Rank of the latent that keys and values of all heads are computed from, which turns on multi-head latent attention
    # (DeepSeek-V2 and V3). null: ordinary attention, without the next four keys.
    kv_lora_rank: Positive | None = None
    q_lora_rank: Positive | None = None  # rank of the queries' latent; null: queries come from the hidden state
    qk_nope_head_dim: Positive | None = None  # dimensions without RoPE of a head's queries and keys
    qk_rope_head_dim: Positive | None = None  # dimensions with RoPE of a head's queries and keys
    v_head_dim: Positive | None = None  # dimensions of a head's values
    num_experts: Positive | None = None  # experts in each layer's MLP (Mixtral, Qwen-MoE); null: a dense MLP
    experts_per_token: Positive = 2  # experts that each token is sent to
    expert_ffn_hidden_size: Positive | None = None  # inner width of an expert; null: ffn_hidden_size
    shared_expert_ffn_hidden_size: Positive | None = None  # width of an expert for all tokens (Qwen2-MoE); null: none
    shared_expert_gate: bool = False  # multiply the shared expert's output by a learned gate (Qwen2-MoE)
    normalize_expert_weights: bool = True  # scale the weights of a token's experts to add up to 1 (Qwen2-MoE: false)
    router_aux_loss: NonNegativeFloat = 0.0  # coefficient of the load-balancing loss of each microbatch; 0: off
    first_dense_layers: NonNegative = 0  # leading layers with a dense MLP instead of experts (DeepSeek-V3: 3)
    router_score: Literal["softmax", "sigmoid"] = "softmax"  # turns router logits into scores (DeepSeek-V3: sigmoid)
    # Add a bias to each expert's score to choose experts, but not to weight them (DeepSeek-V3). The bias is saved with
    # the weights and has no gradient.
    router_bias: bool = False
    # How far an optimizer step moves that bias, up for experts with fewer tokens than the mean and down for others
    # (DeepSeek-V3's pretraining: 0.001). 0: not at all.
    router_bias_update: NonNegativeFloat = 0.0
    # Number of expert groups. A token is only sent to router_groups_per_token of them, those whose two best experts
    # score highest together (DeepSeek-V3). null: a token may be sent to any expert.
    router_groups: Positive | None = None
    router_groups_per_token: Positive | None = None  # groups that a token may be sent to; null without router_groups
    routed_scaling_factor: PositiveFloat = 1.0  # multiplies the output of routed experts, but not of shared ones
    # Activations that backward recomputes. selective: those of core attention; full: all within each layer.
    recompute: Literal["none", "selective", "full"] = "none"
    # Implementation of the layers. auto: Transformer Engine on a GPU that has it and can run the model, otherwise the
    # portable torch modules.
    backend: Literal["auto", "portable", "transformer_engine"] = "auto"


@section
class ParallelConfig:
    """Parallel degrees. The data-parallel degree follows: world size / (tensor · pipeline · context)."""

    tensor: int = 1  # tensor-parallel degree: ranks that split each layer's matrices
    sequence: bool = False  # sequence parallelism: tensor-parallel ranks also split activations between those matrices
    pipeline: int = 1  # pipeline-parallel degree: stages that split the layers
    virtual_pipeline: int = 1  # model chunks per pipeline stage (interleaved schedule); 1: not interleaved
    context: int = 1  # context-parallel degree: ranks that split each sequence
    # Expert-parallel degree: ranks that split the experts. It divides the ranks of a pipeline stage, tensor · context ·
    # data, and every expert is whole on its rank.
    expert: int = 1
    first_stage_layers: Positive | None = None  # layers of the first pipeline stage; null: as many as other stages
    last_stage_layers: Positive | None = None  # layers of the last pipeline stage; null: as many as other stages


@section
class OptimizerConfig:
    """Adam with decoupled weight decay, and a learning rate with linear warmup and then a decay."""

    lr: PositiveFloat = 1e-3  # peak learning rate
    min_lr: NonNegativeFloat = 0.0  # learning rate that a decay ends at
    warmup_steps: NonNegative = 0  # optimizer steps of linear warmup; 0: none
    # Optimizer step at which the decay ends; grpo and ppo may take several per rollout step. null: the stage's last.
    decay_steps: Positive | None = None
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"  # how lr falls after warmup
    weight_decay: NonNegativeFloat = 0.01  # decoupled weight decay; 0: none
    beta1: Fraction = 0.9  # Adam's decay rate of the mean of gradients
    beta2: Fraction = 0.95  # Adam's decay rate of the mean of squared gradients
    epsilon: PositiveFloat = 1e-8  # added to the denominator of Adam's update
    clip_grad: NonNegativeFloat = 1.0  # largest global gradient norm; 0 turns clipping off
    distributed: bool = True  # shard the optimizer state over data-parallel ranks
    # Sum gradients over ranks during backward and, with distributed, gather updated weights during the next forward.
    overlap: bool = False

    def check(self, where: str) -> None:
        """Check the keys against one another.

        Args:
            where: The section's key path, for the message.

        Raises:
            ConfigError: The warmup does not end before the decay does, or `min_lr` exceeds `lr`.
        """
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise ConfigError(
                f"{where}.warmup_steps={self.warmup_steps} must be less than {where}.decay_steps={self.decay_steps}; "
                "lower the one or raise the other"
            )
        if self.min_lr > self.lr:
            raise ConfigError(f"{where}.min_lr={self.min_lr} must not exceed {where}.lr={self.lr}")


@section
class TrainConfig:
    """How a stage trains: its length, its batches, its evaluations and its checkpoints."""

    steps: Positive = 100  # optimizer steps of the stage; for grpo and ppo, rollout steps
    global_batch_size: Positive = 32  # sequences per optimizer step over all ranks; a preference pair is two sequences
    # How sequences form the microbatches of one forward pass. padded: micro_batch_size sequences, padded to the longest
    # of the batch. dynamic: sequences of similar length, padded to their longest, up to micro_batch_tokens. packed:
    # sequences one after the other without padding, up to micro_batch_tokens.
    batching: Literal["padded", "dynamic", "packed"] = "padded"
    micro_batch_size: Positive = 8  # sequences per forward pass on one rank; used by batching=padded only
    # Tokens per forward pass on one rank, at most; used by batching=dynamic and packed. Every sequence must fit, and
    # both sequences of a preference pair must fit together.
    micro_batch_tokens: Positive = 4096
    # Compute logits from the last hidden states for one block of tokens at a time (a block's logits are 512 MiB in bf16
    # on a GPU, 32 MiB on a CPU). The full logits tensor never exists, and backward computes the blocks again. Losses
    # that read whole logits do not use it.
    fused_head: bool = False
    # Where the reference policy of dpo, grpo and ppo is kept. resident: on the device, beside the policy. offload: in
    # host memory, and on the device during a call.
    reference: Literal["resident", "offload"] = "resident"
    seed: NonNegative = 0  # seed of the initial weights, of generated data, of the data's order and of sampling
    eval_every: NonNegative = 0  # steps between evaluations; 0: only before the first step and after the last
    save_every: NonNegative = 0  # steps between checkpoints; 0: only after the last step
    async_save: bool = True  # write checkpoints while training goes on; a stage still waits for its last one
    keep_checkpoints: Positive = 2  # newest checkpoints kept per stage; older ones are deleted
    keep_best: EvalMetric | None = None  # also keep the checkpoint that is best by this eval metric; null: none
    collective_timeout_minutes: PositiveFloat = 10.0  # how long a rank waits for the others before the run fails


@section
class TokenizerConfig:
    """The tokenizer, which all stages of a run share."""

    # A Hugging Face tokenizer's directory. null: the tokenizer that init_from brings from Hugging Face, or otherwise a
    # byte-level BPE trained on the first stage's training text.
    path: str | None = None
    vocab_size: Positive = 512  # tokens of the trained BPE, 258 or more; unused if path is set


# The keys of DataConfig that apply to conversations only, with their defaults.
_OF_CHAT = {"system_prompt": None, "chat_template": None, "chat_template_kwargs": {}, "trained_turns": "all"}
_SHUFFLE_BLOCK = 10_000


@section
class MixedData:
    """One data set of a mixture. The keys that it shares with `data` mean the same there."""

    path: str | tuple[str, ...] | None = None  # files, or a directory
    dataset_name: str | None = None  # a data set of the Hugging Face Hub, instead of path
    subset: str | None = None  # the subset of dataset_name
    split: str | None = None  # the split to train on; null: train
    weight: NonNegativeFloat = 1.0  # its share of the items of a batch, relative to the others
    name: str | None = None  # its name in messages and for mix_weights; null: the name of its file or data set
    columns: dict[str, str] | None = None  # our name of a field -> its name in the records; null: data.columns

    @property
    def shown_name(self) -> str:
        """Return its name."""
        place = self.dataset_name or (self.path if isinstance(self.path, str) else (self.path or ("",))[0])
        return self.name or PurePath(place).name.split(".")[0]


@section
class DataConfig:
    """The data to train and evaluate on. Each data source declares a subclass, as in config/data_sources.py.

    A key that a source does not use must keep its default.

    Attributes:
        provides: The kinds of training data that the source has, of config/data_kinds.py or its own.
        heldout_kind: The kind of its held-out data, which decides how a stage is evaluated.
        reads_path: Whether the source needs `path` or `dataset_name`.
        reads_records: Whether it reads files with the package's readers, as the keys from `dataset_name` to `columns`
            say.
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
    # data.task.name is set, otherwise the one that reads what the algorithm learns from.
    source: str
    # A file (.jsonl, .parquet or text; .gz too), a directory, a pattern such as part-*.parquet, or a list of them. A
    # directory is a Hugging Face data set, or has files named for their splits, such as train.jsonl and test.jsonl, or
    # is read as a whole. For task, the option path of the task.
    path: str | tuple[str, ...] | None = None
    dataset_name: str | None = None  # a data set of the Hugging Face Hub, instead of path
    subset: str | None = None  # the subset of dataset_name, which the Hub calls its configuration
    # The split to train on, of dataset_name or of a directory. null: train.
    split: str | None = None
    eval_path: str | tuple[str, ...] | None = None  # held-out data, in the forms of path
    # The held-out split, of dataset_name or of a directory. null: test or validation if there is one.
    eval_split: str | None = None
    # Our name of a field -> its name in the records, as in question: problem or answer: reward_model.ground_truth.
    columns: dict[str, str] = field(default_factory=dict)
    mix: tuple[MixedData, ...] = ()  # data sets that batches are mixed of, instead of path and dataset_name
    # A function of the step that returns the weights of mix, in their order or by name, as in curriculum.py:weights.
    # null: those of mix.
    mix_weights: str | None = None
    # Read records block by block while the stage trains, instead of all before the first step.
    streaming: bool = False
    shuffle_block: Positive = _SHUFFLE_BLOCK  # records of a block, which are shuffled together; used by streaming only
    # Directory in which the tokens of large data (4 MiB of text) are kept for later runs. null: rl_megatron/tokens in
    # $XDG_CACHE_HOME or ~/.cache. off: they are not kept.
    cache_dir: str | None = None
    # Share of the data that is held out for evaluation if it has no held-out split; unused by task.
    heldout_fraction: Fraction = 0.05
    sequence_length: Positive = 128  # tokens of a pretraining window
    # How records become text. chat: as a conversation, with the tokenizer's chat template. plain: with the two
    # templates below alone. auto: chat if records are conversations (`messages`, or lists of messages as `prompt`,
    # `chosen` or `rejected`), otherwise plain.
    format: Literal["auto", "plain", "chat"] = "auto"
    # The prompt, a Python format string over a record's fields; for a task, over those of its problem's record and
    # {prompt}. With format=chat it is the user's message. null: a task's own prompt, or otherwise the field of the
    # records that holds the prompt, such as `question`, which plain text ends with a line break.
    prompt_template: str | None = None
    # The answer, a format string as well. For preference, {answer} is the chosen or the rejected text. null: {answer},
    # or another field of the records that holds the answer, such as `completion`.
    answer_template: str | None = None
    system_prompt: str | None = None  # with format=chat, the system message of conversations without one; null: none
    chat_template: str | None = None  # a file with the Jinja template of format=chat; null: the tokenizer's template
    # Further variables of the chat template, for example {enable_thinking: false}.
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trained_turns: Literal["all", "last"] = "all"  # with format=chat, the assistant's turns that are learned
    # What to do with a sequence longer than model.max_sequence_length, or a prompt that leaves too little of it for
    # generation.max_new_tokens. error: stop the run. truncate: cut the end of a sequence, and the beginning of a prompt
    # for generation. drop: leave it out, and a preference pair as a whole.
    too_long: Literal["error", "truncate", "drop"] = "error"
    num_eval_examples: Positive = 256  # held-out sequences, or problems, per evaluation; a pair is two sequences
    task: dict[str, Any] = field(default_factory=dict)  # name and options of a registered task, for source=task
    num_documents: Positive = 20_000  # pretraining documents that a task generates
    num_demonstrations: Positive = 1_000  # SFT examples taken from a task

    def check(self, stage: StageConfig) -> None:
        """Check the requirements of the source on the other sections of its stage.

        Raises:
            ConfigError: A key contradicts another or has no effect; the message names it.
        """
        places = {"path": self.path, "dataset_name": self.dataset_name, "mix": self.mix}
        given = [key for key, place in places.items() if place]
        if len(given) > 1:
            raise ConfigError(f"data.{given[0]} and data.{given[1]} both say where the data is; remove one")
        if self.mix:
            self._check_mix()
        elif self.mix_weights is not None:
            raise ConfigError(f"data.mix_weights={self.mix_weights} has no effect without data.mix; remove it")
        if self.shuffle_block != _SHUFFLE_BLOCK and not self.streaming:
            raise ConfigError(
                f"data.shuffle_block={self.shuffle_block} has no effect without data.streaming; remove it"
            )
        if self.subset is not None and self.dataset_name is None:
            raise ConfigError(f"data.subset={self.subset} has no effect without data.dataset_name; remove it")
        of_readers = "dataset_name split eval_path eval_split columns mix streaming".split()
        for key in () if self.reads_records else of_readers:
            if getattr(self, key):
                raise ConfigError(
                    f"data.{key}={getattr(self, key)} has no effect: data.source={self.source} does not read it; "
                    "remove it"
                )
        self._check_effect()

    def _check_effect(self) -> None:
        """Refuse keys that would have no effect."""
        chosen: Any = type(self)
        defaults = chosen() if self.ignores else self
        for key in self.ignores:
            if getattr(self, key) != getattr(defaults, key):
                raise ConfigError(
                    f"data.{key}={getattr(self, key)!r} has no effect on data.source={self.source}; leave it out"
                )
        if self.format == "plain":
            self.check_plain("data.format=plain")

    def check_plain(self, why: str) -> None:
        """Refuse keys of conversations for records that are plain text.

        Args:
            why: What makes the records plain text, for the message.

        Raises:
            ConfigError: Such a key is set.
        """
        for key, default in _OF_CHAT.items():
            if getattr(self, key) != default:
                raise ConfigError(
                    f"data.{key}={getattr(self, key)!r} has no effect with {why}; set data.format=chat, or leave it out"
                )

    def _check_mix(self) -> None:
        """Check the data sets of a mixture against one another.

        Raises:
            ConfigError: One has no place or two, two have one name, or all weights are 0.
        """
        for key in ("subset", "split"):
            if getattr(self, key) is not None:
                raise ConfigError(f"data.{key} has no effect with data.mix; set it in the data sets of data.mix")
        names: list[str] = []
        for number, each in enumerate(self.mix):
            where = f"data.mix[{number}]"
            if (each.path is None) == (each.dataset_name is None):
                raise ConfigError(f"{where} needs a path or a dataset_name, and not both; set one")
            if each.subset is not None and each.dataset_name is None:
                raise ConfigError(f"{where}.subset={each.subset} has no effect without dataset_name; remove it")
            if each.shown_name in names:
                raise ConfigError(
                    f"{where} and data.mix[{names.index(each.shown_name)}] are both called {each.shown_name!r}; set "
                    f"{where}.name"
                )
            names.append(each.shown_name)
        if not any(each.weight for each in self.mix):
            raise ConfigError("data.mix: every weight is 0, so that no record would be read; set one of them")

    def require_place(self) -> None:
        """Check that the section says where its data is. It is checked before a run, but not to print a configuration.

        Raises:
            ConfigError: It does not, and the source reads files.
        """
        if self.reads_path and self.path is None and self.dataset_name is None and not self.mix:
            records = ", data.dataset_name to a data set of the Hub" if self.reads_records else ""
            raise ConfigError(
                f"data.path is not set and data.source={self.source} reads it; set data.path to a file or directory"
                f"{records}, or data=arithmetic to try without files"
            )


@section
class GenerationConfig:
    """How completions are generated, for the rollouts of grpo and ppo and to evaluate on problems.

    The keys from `num_engines` to `refit_bucket_mb` are for engines in their own processes, such as transformers.
    """

    max_new_tokens: Positive = 32  # most tokens of a completion
    temperature: NonNegativeFloat = 1.0  # divides the logits before sampling; 0: greedy. Evaluation is always greedy
    top_k: NonNegative = 0  # sample from the k likeliest tokens; 0: off
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0  # sample from the likeliest tokens of this total mass; 1: off
    # Tokens that end a completion, besides end-of-sequence and the token that ends a turn in the chat template. Each is
    # one token, and may be a special one such as <|im_end|>.
    stop_tokens: tuple[str, ...] = ()
    # Texts of any number of tokens that end a completion, which includes them.
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    batch_size: Positive = 256  # sequences decoded together on one data-parallel rank, or in one engine process
    # Name of a registered rollout engine. embedded: the sharded training model itself generates. transformers: a
    # Hugging Face model in its own processes, which get the policy's weights after each change.
    engine: str = "embedded"
    num_engines: Positive = 1  # engine processes, among which the prompts are divided
    # auto: the CPU if the policy computes on the CPU; otherwise the GPUs after those of the machine's ranks, or rank
    # 0's GPU with refit=shared_memory. cpu: the CPU. cuda: GPUs 0, 1, …. cuda:N: GPUs N, N+1, ….
    engine_device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    engine_timeout_minutes: PositiveFloat = 30.0  # an engine that takes longer over an answer counts as dead
    max_engine_restarts: NonNegative = 3  # engine deaths that a stage survives by a restart; one more ends the run
    # How weights reach the engines. collective: one all-reduce per bucket; shared_memory: on one machine only.
    refit: Literal["collective", "shared_memory"] = "collective"
    refit_bucket_mb: PositiveFloat = 256.0  # MiB of weights sent together; each side holds two such buckets
    # The logprob check: once for each copy of the weights that an engine serves, it completes this many of the step's
    # prompts, and its logprobs are compared with the trainer's before anything is learned from it. 0: no check.
    gate_prompts: NonNegative = 4
    # Largest mean |trainer's − engine's logprob| of that check, in nats; more stops the run. null: fp32 1e-4, bf16 0.1.
    gate_limit: PositiveFloat | None = None


@section
class AlgorithmConfig:
    """The settings that every algorithm has. Each algorithm declares a subclass, as in config/algorithms.py.

    Attributes:
        learns_from: The kind of training data, one of config/data_kinds.py or a data source's own.
        leaves_language_model: Whether a stage after this one can start from its weights.
        may_change_on_resume: Keys that may have other values when a run is resumed (checkpoint/rerun.py).
    """

    learns_from: ClassVar[str]
    leaves_language_model: ClassVar[bool] = True
    may_change_on_resume: ClassVar[frozenset[str]] = frozenset()
    usual_loss: ClassVar[str | None] = None

    name: str  # name of a registered algorithm: pretrain, sft, dpo, reward_model, grpo, ppo, or a plugin's

    def check(self, stage: StageConfig) -> None:
        """Check the requirements of the algorithm on the other sections of its stage.

        Raises:
            ConfigError: A key contradicts another; the message names both.
        """

    def optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the policy takes, which is the default length of the learning-rate decay."""
        return train.steps


@section
class StageConfig:
    """One stage of a run: an algorithm and every setting that it uses."""

    # the algorithm and its settings (config/algorithms.py)
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], named_class("name", ALGORITHM_CONFIGS)]
    model: ModelConfig  # the model's architecture; the same in all stages
    parallel: ParallelConfig  # the parallel layout; the same in all stages
    optimizer: OptimizerConfig  # the policy's optimizer
    train: TrainConfig  # steps, batches, evaluations and checkpoints
    tokenizer: TokenizerConfig  # the tokenizer; the same in all stages
    # the data source and its settings (config/data_sources.py)
    data: Annotated[SerializeAsAny[DataConfig], named_class("source", SOURCE_CONFIGS)]
    generation: GenerationConfig  # sampling and the rollout engine
    reward: RewardConfig = field(default_factory=RewardConfig)  # reward functions and the processes that run them
    loss: dict[str, Any]  # name and settings of a registered loss (rl_megatron/losses); pretrain and sft use nll
    precision: Literal["fp32", "bf16"]  # of weights and activations; with bf16, the optimizer keeps fp32 weights
    device: Literal["auto", "cpu", "cuda"]  # auto: one GPU per rank if there are GPUs, otherwise the CPU

    @property
    def scores_completions(self) -> bool:
        """Return whether the stage samples completions and scores them, to learn or to be evaluated."""
        return PROBLEMS in (self.algorithm.learns_from, self.data.heldout_kind)


@section
class RunConfig:
    """A run: stages in order, each starting from the weights that the stage before it left."""

    stages: dict[str, StageConfig]  # stages by name, in order
    # Directory of metrics, checkpoints, the tokenizer and the effective configuration. null: outputs/ and the name of
    # the experiment or, without one, of the algorithm.
    output_dir: str
    plugins: tuple[str, ...] = ()  # the user's own modules that register losses, tasks, algorithms, …
    metric_sinks: tuple[str, ...] = ("jsonl", "tensorboard")  # where metrics are written; jsonl must be listed
    init_from: str | None = None  # a checkpoint directory whose weights start the first stage; null: new weights
    # Go on with the run in output_dir, if there is one. false: move it to output_dir.previous, and begin anew.
    resume: bool = True

    @property
    def first(self) -> StageConfig:
        """Return the first stage."""
        return next(iter(self.stages.values()))
