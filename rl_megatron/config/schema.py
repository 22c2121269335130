"""The configuration, one frozen dataclass per YAML section. Field comments are the documentation of the keys.

Values are checked on construction: unknown keys, wrong types and values out of range are refused by name. Checks that
need two sections live in `load.py`; checks that need the world size live in `topology`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny
from pydantic.dataclasses import dataclass

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.eval_metrics import HIGHER_IS_BETTER
from rl_megatron.config.named_class import named_class
from rl_megatron.config.registry import Registry

_STRICT = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
Section = TypeVar("Section")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(cls: type[Section]) -> type[Section]:
    """Make `cls` a section of the configuration: a frozen dataclass whose keys, types and ranges pydantic checks."""
    return dataclass(frozen=True, config=_STRICT, kw_only=True)(cls)  # pyright: ignore[reportReturnType]  # it is cls


def _no_switch(value: Any) -> Any:
    """Python counts true as 1; in a configuration it is a misplaced switch."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Number = BeforeValidator(_no_switch)
Positive = Annotated[int, Field(ge=1), Number]
NonNegative = Annotated[int, Field(ge=0), Number]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), Number]
ClosedFraction = Annotated[float, Field(ge=0.0, le=1.0), Number]
PositiveFloat = Annotated[float, Field(gt=0.0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0.0), Number]
if TYPE_CHECKING:
    Measure = str  # the names are only known once the evaluation metrics are declared
else:
    Measure = Literal[tuple(HIGHER_IS_BETTER)]

# The dataclass of every algorithm's settings by algorithm.name, and of every data source's by data.source.
ALGORITHM_CONFIGS: Registry[type[AlgorithmConfig]] = Registry("algorithm")
SOURCE_CONFIGS: Registry[type[DataConfig]] = Registry("data source")


@section
class LinearRope:
    """Positions divided by `factor` (Gemma 3)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


@section
class Llama3Rope:
    """Frequencies of waves longer than the context first trained on divided by `factor`, short waves as they are, and
    in between what is in between (Llama 3.1 and later)."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0  # long: original_max_position_embeddings / low_freq_factor and more
    high_freq_factor: PositiveFloat = 4.0  # short: original_max_position_embeddings / high_freq_factor and less
    original_max_position_embeddings: Positive


@section
class YarnRope:
    """YaRN: frequencies go by how often they turn within the context first trained on (DeepSeek, Qwen).

    Source: Peng et al. 2023 (arXiv:2309.00071).
    """

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_position_embeddings: Positive
    beta_fast: PositiveFloat = 32.0  # turns from which a frequency stays as it is
    beta_slow: PositiveFloat = 1.0  # turns up to which it is divided by factor
    truncate: bool = True  # the bounds of the two are rounded to whole dimensions
    # Rotated queries and keys grow by (0.1·mscale·ln factor + 1) / (0.1·mscale_all_dim·ln factor + 1), or, unless both
    # are given, by 0.1·ln factor + 1; or by attention_factor.
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope, Field(discriminator="kind")]


@section
class ModelConfig:
    """A decoder like LLaMA: RMSNorm, gated MLP, RoPE, grouped-query attention; dense, or a mixture of experts."""

    num_layers: Positive = 4
    hidden_size: Positive = 128
    ffn_hidden_size: Positive = 384
    num_attention_heads: Positive = 4
    num_query_groups: Positive = 4  # key/value heads; equal to num_attention_heads for plain multi-head attention
    head_dim: Positive | None = None  # null: hidden_size / num_attention_heads
    max_sequence_length: Positive = 256
    vocab_size: Positive | None = None  # rows of the embedding; null: one for each of the tokenizer's tokens
    rope_base: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None  # for contexts longer than first trained on: kind linear, llama3 or yarn
    local_rope_base: PositiveFloat | None = None  # of layers with a window, unscaled (Gemma 3); null: as the others'
    norm_epsilon: PositiveFloat = 1e-5
    zero_centered_norm: bool = False  # norms multiply by 1 + weight (Gemma)
    sandwich_norms: bool = False  # norms after attention and MLP too, before the residual is added (Gemma 2 and 3)
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the MLP's gate; gelu_tanh: Gemma's
    scale_embeddings: bool = False  # embeddings are multiplied by the root of hidden_size (Gemma)
    tie_embeddings: bool = True  # the output head is the embedding matrix
    qkv_bias: bool = False  # Qwen2 has one
    qk_norm: bool = False  # Qwen3 has it
    query_pre_attn_scalar: Positive | None = None  # scores are divided by its root (Gemma); null: the head's dimension
    init_std: PositiveFloat = 0.02
    sliding_window: Positive | None = None  # tokens a token may look at, itself included; null: all before it
    global_attention_every: Positive | None = None  # each so-many-th layer is without the window (Gemma 3: 6)
    # Multi-head latent attention (DeepSeek-V2 and -V3), with kv_lora_rank: keys and values of all heads come of one
    # latent of that rank. A head's queries and keys have qk_nope_head_dim dimensions without RoPE and qk_rope_head_dim
    # with it, its values v_head_dim.
    kv_lora_rank: Positive | None = None
    q_lora_rank: Positive | None = None  # queries come of a latent too; null: of the hidden state
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Positive | None = None
    v_head_dim: Positive | None = None
    num_experts: Positive | None = None  # experts of each layer's MLP (Mixtral, Qwen-MoE); null: a dense MLP
    experts_per_token: Positive = 2
    expert_ffn_hidden_size: Positive | None = None  # null: ffn_hidden_size
    shared_expert_ffn_hidden_size: Positive | None = None  # an expert that every token sees (Qwen2-MoE); null: none
    shared_expert_gate: bool = False  # the shared expert's output is weighed by a learned gate (Qwen2-MoE)
    normalize_expert_weights: bool = True  # weights of a token's experts add up to 1 (Qwen2-MoE: false)
    router_aux_loss: NonNegativeFloat = 0.0  # coefficient of the load-balancing loss; its value depends on microbatches
    first_dense_layers: NonNegative = 0  # layers with a dense MLP before those with experts (DeepSeek-V3: 3)
    router_score: Literal["softmax", "sigmoid"] = "softmax"  # of an expert (DeepSeek-V3: sigmoid)
    # A number for each expert, added to its score where experts are chosen and not where they are weighed, as
    # DeepSeek-V3 has it. It travels with the weights, and has no gradient.
    router_bias: bool = False
    # How far each optimizer step moves it, up for experts with fewer tokens than the mean, down for those with more
    # (DeepSeek-V3's pretraining: 0.001); 0: it stays as it is.
    router_bias_update: NonNegativeFloat = 0.0
    # Experts in so many groups, of which a token visits the router_groups_per_token whose best two experts score most
    # (DeepSeek-V3); null: any expert.
    router_groups: Positive | None = None
    router_groups_per_token: Positive | None = None
    routed_scaling_factor: PositiveFloat = 1.0  # what experts give is multiplied with it; shared experts' is not
    recompute: Literal["none", "selective", "full"] = "none"  # activations recomputed in backward
    backend: Literal["auto", "portable", "transformer_engine"] = "auto"  # auto: Transformer Engine on a GPU that has it


@section
class ParallelConfig:
    """Degrees; data parallel is what the world size leaves: world = tensor · pipeline · context · data."""

    tensor: int = 1
    sequence: bool = False  # sequence parallelism over the tensor-parallel ranks
    pipeline: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline stage (interleaved schedule)
    context: int = 1
    expert: int = 1  # experts over the ranks of a pipeline stage (tensor · context · data); each expert lies whole
    first_stage_layers: Positive | None = None  # of an uneven pipeline; null: as many as every other stage
    last_stage_layers: Positive | None = None


@section
class OptimizerConfig:
    """Adam with decoupled weight decay, linear warmup, then decay to `min_lr`."""

    lr: PositiveFloat = 1e-3
    min_lr: NonNegativeFloat = 0.0
    warmup_steps: NonNegative = 0
    decay_steps: Positive | None = None  # null: the stage's optimizer steps; grpo and ppo may take several a step
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"
    weight_decay: NonNegativeFloat = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0  # global gradient norm; 0 turns clipping off
    distributed: bool = True  # optimizer state sharded over data-parallel ranks
    # Gradients are summed over data-parallel ranks while backward runs, and the distributed optimizer's new weights
    # gathered while the next forward does.
    overlap: bool = False

    def check(self, where: str) -> None:
        """Check the keys against one another.

        Args:
            where: The section's key path, for the message.

        Raises:
            ConfigError: the warmup does not end before the decay does, or `min_lr` exceeds `lr`.
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
    steps: Positive = 100  # optimizer steps; for grpo and ppo: rollout steps
    global_batch_size: Positive = 32  # rows per optimizer step, over all ranks; a pair is two rows
    # What goes through the model together on one rank. padded: micro_batch_size rows, padded to the batch's longest;
    # dynamic: rows of like length, padded to their longest, up to micro_batch_tokens; packed: rows one after the other
    # without padding, up to micro_batch_tokens.
    batching: Literal["padded", "dynamic", "packed"] = "padded"
    micro_batch_size: Positive = 8  # rows per forward pass on one rank; dynamic and packed go by tokens
    micro_batch_tokens: Positive = 4096  # token budget of a dynamic or packed microbatch; every row, or pair, must fit
    # Losses and logprobs read the logits a chunk of tokens at a time (512 MiB of bf16, on a CPU 32 MiB), out of the
    # model's last hidden states: whole logits never exist, and are computed a second time in backward.
    fused_head: bool = False
    # The reference policy of dpo, grpo and ppo. resident: on the device beside the policy; offload: in the host's
    # memory, on the device during a call.
    reference: Literal["resident", "offload"] = "resident"
    seed: NonNegative = 0
    eval_every: NonNegative = 0  # steps between evaluations; 0: only before the first step and after the last
    save_every: NonNegative = 0  # steps between checkpoints; 0: only at the end
    async_save: bool = True  # checkpoints are written from a copy while training goes on; the last is waited for
    keep_checkpoints: Positive = 2  # per stage; older ones are deleted
    keep_best: Measure | None = None  # a held-out measure: the checkpoint that is best by it is kept, too
    collective_timeout_minutes: PositiveFloat = 10.0


@section
class TokenizerConfig:
    path: str | None = None  # a Hugging Face tokenizer directory; null: train a BPE on the run's data
    vocab_size: Positive = 512  # of the trained BPE


@section
class DataConfig:
    """What the model reads. Each data source declares a subclass, as in config/data_sources.py; keys that a source does
    not use have no effect.

    Attributes:
        provides: The kinds of training data that the source has, of config/data_kinds.py or its own.
        heldout_kind: The kind of its held-out data, which decides how a stage is evaluated.
        reads_path: Whether the source needs `path`.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    heldout_kind: ClassVar[str]
    reads_path: ClassVar[bool] = True

    source: str
    path: str | None = None  # file, or directory with train.jsonl and test.jsonl; of preferences: data/preferences.py
    heldout_fraction: Fraction = 0.05  # split off a single file
    sequence_length: Positive = 128  # pretraining windows
    prompt_template: str = "{question}\n"
    answer_template: str = "{answer}"  # of preferences: {answer} is the chosen or the rejected text
    too_long: Literal["error", "truncate", "drop"] = "error"  # rows past model.max_sequence_length
    num_eval_examples: Positive = 256  # held-out sequences, or problems, per evaluation; a pair is two sequences
    task: dict[str, Any] = field(default_factory=dict)  # name and keys of a registered task (data/tasks)
    num_documents: Positive = 20_000  # generated pretraining documents
    num_demonstrations: Positive = 1_000  # generated SFT demonstrations

    def check(self, stage: StageConfig) -> None:
        """Check what the source asks of the other sections of its stage.

        Raises:
            ConfigError: a key contradicts another or is missing; the message names it.
        """
        if self.reads_path and self.path is None:
            raise ConfigError(f"data.path is not set and data.source={self.source} reads it; add data.path=…")


@section
class GenerationConfig:
    max_new_tokens: Positive = 32
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_k: NonNegative = 0  # 0: off
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    stop_tokens: tuple[str, ...] = ()  # besides the end-of-sequence token; each must be one token
    batch_size: Positive = 256  # rows decoded together on one data-parallel rank, or in one engine's process
    # A registered rollout engine. embedded: the training model itself generates, sharded as it is. transformers: a
    # Hugging Face model does, in processes of its own, which get the policy's weights whenever they changed.
    engine: str = "embedded"
    num_engines: Positive = 1  # such processes; prompts are shared out
    # auto: the CPU where the policy computes on it; else, for refit=collective, the GPUs after those of the machine's
    # ranks, and for shared_memory rank 0's. cuda: GPUs from the machine's first on; cuda:N: from N on.
    engine_device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    engine_timeout_minutes: PositiveFloat = 30.0  # an engine that takes longer over an answer counts as dead
    max_engine_restarts: NonNegative = 3  # in a stage; a death beyond them ends the run
    refit: Literal["collective", "shared_memory"] = "collective"  # how weights reach engines; the second: one machine
    refit_bucket_mb: PositiveFloat = 256.0  # MiB of weights that travel together; each side holds two such buckets
    # Before anything is learnt from an engine, and after every refit, it completes this many of the step's prompts
    # and the trainer says how likely it finds them; 0: no such comparison.
    gate_prompts: NonNegative = 4
    # The run halts where the two logprobs of a token differ by more than this on average (nats); null: 1e-4 in fp32,
    # 0.1 in bf16.
    gate_limit: PositiveFloat | None = None


@section
class AlgorithmConfig:
    """The settings that every algorithm has. Each algorithm declares a subclass, as in config/algorithms.py.

    Attributes:
        learns_from: The kind of training data, one of config/data_kinds.py or a data source's own.
        leaves_language_model: Whether a stage after this one can start from its weights.
        may_change_on_resume: Keys whose values may differ from those that the run began with.
    """

    learns_from: ClassVar[str]
    leaves_language_model: ClassVar[bool] = True
    may_change_on_resume: ClassVar[frozenset[str]] = frozenset()

    name: str

    def check(self, stage: StageConfig) -> None:
        """Check what the algorithm asks of the other sections of its stage.

        Raises:
            ConfigError: a key contradicts another; the message names both.
        """

    def optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the policy takes, which is the default length of the learning-rate decay."""
        return train.steps


@section
class StageConfig:
    """One algorithm run from start to end: everything a stage may set."""

    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], named_class("name", ALGORITHM_CONFIGS)]
    model: ModelConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    tokenizer: TokenizerConfig
    data: Annotated[SerializeAsAny[DataConfig], named_class("source", SOURCE_CONFIGS)]
    generation: GenerationConfig
    loss: dict[str, Any]  # name and keys of a registered loss (rl_megatron/losses)
    precision: Literal["fp32", "bf16"]
    device: Literal["auto", "cpu", "cuda"]


@section
class RunConfig:
    """A run: stages in order, each starting from the weights the one before left."""

    stages: dict[str, StageConfig]
    output_dir: str
    plugins: tuple[str, ...] = ()  # modules of the user's own that register losses, tasks, algorithms, …
    metric_sinks: tuple[str, ...] = ("jsonl", "tensorboard")  # where metrics are written; jsonl is always one of them
    init_from: str | None = None  # a checkpoint directory to start the first stage from
    resume: bool = True  # continue from the newest checkpoint in output_dir

    @property
    def first(self) -> StageConfig:
        return next(iter(self.stages.values()))
