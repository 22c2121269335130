"""The cases: a model in a layout, and the batch of a step. Both sides read them."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_SIZE = 4096
PROMPT_TOKENS = 128

_MODEL = (
    "model=nano", "model.hidden_size=256", "model.ffn_hidden_size=768", "model.num_attention_heads=4",
    "model.num_query_groups=2", "model.max_sequence_length=1024", f"+model.vocab_size={VOCAB_SIZE}",
)  # fmt: skip
_STEP = ("precision=bf16", "train.batching=padded", "train.micro_batch_size=2")
_GRPO = ("algorithm=grpo", "data.task.name=arithmetic", "loss.reference_policy_kl_penalty=0")
_SFT = ("algorithm=sft", "data.path=none.jsonl", "loss=nll")


@dataclass(frozen=True)
class Case:
    """A model in a layout.

    Attributes:
        name: What the table calls it.
        world_size: The number of ranks.
        overrides: The configuration, beyond what all cases have.
        sequences: The sequences of the global batch, which is the whole rollout.
        length: The tokens of each sequence.
        phases: The phases to compare, in the order in which they run.
        layers_are_extrapolated: Whether the plan runs stacks of two other depths, as the command does for deep models.
    """

    name: str
    world_size: int = 1
    overrides: tuple[str, ...] = ()
    sequences: int = 4
    length: int = 1024
    phases: tuple[str, ...] = ("logprobs", "train")
    layers_are_extrapolated: bool = False

    @property
    def configuration(self) -> list[str]:
        """Return the overrides of both sides."""
        sizes = [f"train.global_batch_size={self.sequences}"]
        if "logprobs" in self.phases:
            sizes += [f"algorithm.prompts_per_step={self.sequences // 2}", "algorithm.samples_per_prompt=2"]
        algorithm = _GRPO if "logprobs" in self.phases else _SFT
        return [*_MODEL, *_STEP, *algorithm, *sizes, *self.overrides]


_EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_hidden_size=384")
_UNTIED = ("model.tie_embeddings=false",)
_PACKED = ("train.batching=packed", "train.micro_batch_tokens=2048")
_FUSED = ("train.fused_head=true",)
_TENSOR = ("parallel.tensor=2", "parallel.sequence=true")
_PIPELINE = ("parallel.pipeline=2",)

CASES = (
    Case("one rank"),
    Case("fp32", overrides=("precision=fp32",)),
    Case("untied, fused head", overrides=(*_UNTIED, *_FUSED)),
    Case("packed, full recomputation", overrides=(*_PACKED, "model.recompute=full")),
    Case("selective recomputation", overrides=("model.recompute=selective",)),
    Case("sliding window", overrides=("model.sliding_window=256", "model.qk_norm=true")),
    Case("reference policy", overrides=("loss.reference_policy_kl_penalty=0.1",),
         phases=("logprobs", "reference", "train")),
    Case("weights sent", phases=("refit", "logprobs", "train")),
    Case("sft, 12 layers", overrides=("model.num_layers=12",), phases=("train",), layers_are_extrapolated=True),
    Case("experts", overrides=_EXPERTS),
    Case("tensor 2", 2, ("parallel.tensor=2",)),
    Case("tensor 2, sequence", 2, _TENSOR),
    Case("tensor 2, sequence, packed, fused head", 2, (*_TENSOR, *_PACKED, *_FUSED)),
    Case("tensor 2, weights sent", 2, ("parallel.tensor=2",), phases=("refit", "logprobs", "train")),
    Case("pipeline 2", 2, _PIPELINE, sequences=8),
    Case("pipeline 2, virtual 2, untied", 2, (*_PIPELINE, "parallel.virtual_pipeline=2", *_UNTIED), sequences=8),
    Case("context 2", 2, ("parallel.context=2",)),
    Case("context 2, packed, fp32", 2, ("parallel.context=2", *_PACKED, "precision=fp32")),
    Case("data 2", 2),
    Case("data 2, optimizer not distributed", 2, ("optimizer.distributed=false",)),
    Case("expert 2", 2, (*_EXPERTS, "parallel.expert=2")),
    Case("expert 2, tensor 2", 2, (*_EXPERTS, *_TENSOR, "parallel.expert=2", *_UNTIED)),
    Case("tensor 2, pipeline 2, full recomputation", 4, (*_TENSOR, *_PIPELINE, "model.recompute=full"), sequences=8),
    Case("data 4, overlap", 4, ("optimizer.overlap=true",), sequences=8),
)  # fmt: skip
