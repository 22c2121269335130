"""Choose a mutation of a configuration: its overrides, and the words that a refusal must contain."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WRONG = ("abc", "true", "[1,2]", "{a: 1}", "nan", "null", "''", "1.5", "inf")
_NUMBERS = ("-1", "0", "1", "2", "3", "7", "0.5", "1.5", "-0.1")
_MISSING = ("absent.jsonl", "broken.jsonl", "empty.jsonl", "own.py", "/nowhere/at/all")
_TYPO_FREE = ("stages", "hydra")
# Values that most configurations accept.
_VALID = {
    "optimizer.lr": ("1e-4", "3e-3"), "optimizer.beta1": ("0.5", "0.8"), "optimizer.weight_decay": ("0", "0.1"),
    "optimizer.clip_grad": ("0", "0.5"), "optimizer.decay_style": ("constant", "linear", "cosine"),
    "optimizer.distributed": ("false",), "train.seed": ("1", "7", "123"), "train.global_batch_size": ("4", "8"),
    "train.micro_batch_size": ("2", "4"), "train.batching": ("packed", "dynamic"), "train.eval_every": ("1",),
    "train.save_every": ("1",), "train.async_save": ("false",), "train.fused_head": ("true",),
    "train.reference": ("offload",), "model.num_layers": ("2",), "model.tie_embeddings": ("false",),
    "model.qk_norm": ("true",), "model.qkv_bias": ("true",), "model.activation": ("gelu_tanh",),
    "model.num_query_groups": ("1",), "model.rope_base": ("5000",), "model.head_dim": ("16", "8"),
    "model.init_std": ("0.1",), "model.recompute": ("full", "selective"), "generation.temperature": ("0.7", "1.3"),
    "generation.top_k": ("5",), "generation.top_p": ("0.9",), "generation.max_new_tokens": ("2", "6"),
    "generation.gate_prompts": ("0", "1"), "generation.batch_size": ("2",), "precision": ("bf16",),
    "tokenizer.vocab_size": ("300",), "metric_sinks": ("[jsonl]",), "data.num_eval_examples": ("2", "6"),
    "train.keep_checkpoints": ("1",), "data.too_long": ("drop", "truncate"), "resume": ("false",),
}  # fmt: skip
_CONTRADICTIONS = (
    ("optimizer.min_lr=1", "optimizer.lr=1e-3"), ("optimizer.warmup_steps=9", "optimizer.decay_steps=3"),
    ("model.num_attention_heads=3", "model.num_query_groups=2"), ("model.num_experts=2", "model.experts_per_token=4"),
    ("model.global_attention_every=2",), ("model.kv_lora_rank=8",), ("generation.num_engines=2",),
    ("generation.gate_prompts=0", "generation.gate_limit=0.1"), ("train.keep_best=accuracy", "train.save_every=3"),
    ("parallel.tensor=2",), ("parallel.pipeline=2", "parallel.virtual_pipeline=2"), ("parallel.expert=3",),
    ("parallel.context=3",), ("train.batching=packed", "train.micro_batch_tokens=2"), ("data.sequence_length=9999",),
    ("generation.max_new_tokens=9999",), ("generation.temperature=0",), ("device=cuda",),
    ("loss.use_cispo=true", "loss.ratio_clip_c=3"), ("algorithm.leave_one_out=true",), ("model.vocab_size=9",),
    ("algorithm.samples_per_prompt=1",), ("data.num_eval_examples=99999",), ("train.global_batch_size=9999",),
    ("data.prompt_template='{nothing}'",), ("data.answer_template='{nothing}'",), ("generation.stop_tokens=[zzz]",),
)  # fmt: skip
_PRESETS = {
    "loss": (
        "dpo",
        "kto",
        "ipo",
        "simpo",
        "nll",
        "preference",
        "clipped_pg",
        "distillation",
        "mse_value",
        "absent",
        "own",
    ),
    "data": ("text", "arithmetic", "gsm8k", "gsm8k_pairs", "absent"),
    "algorithm": ("pretrain", "sft", "dpo", "kto", "online_dpo", "reward_model", "grpo", "ppo", "absent"),
    "model": ("nano_moe", "init_from", "absent"),
    "data.source": ("text", "prompt_answer", "preference", "labelled", "prompts", "task", "absent"),
    "generation.engine": ("embedded", "megatron", "absent"),
    "algorithm.advantage_estimator": ("group_relative", "reinforce_plus_plus", "own.py:advantages", "own.py:absent"),
    "loss.name": ("own.py:loss", "own.py:absent", "absent.py:loss", "dpo", "nll", "own.py:Task"),
    "data.task.name": ("own.py:Task", "own.py:loss", "arithmetic", "gsm8k", "absent", "7"),
}
_PATHS = ("data.path", "data.eval_path", "tokenizer.path", "init_from", "data.chat_template", "output_dir")


@dataclass(frozen=True)
class Mutation:
    """A change of a configuration.

    Attributes:
        kind: The kind of change.
        overrides: The overrides that are added.
        words: A refusal names at least one of these.
    """

    kind: str
    overrides: tuple[str, ...]
    words: tuple[str, ...]


def mutation(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    """Return a random mutation of a configuration with these keys and values."""
    kinds = {
        _valid: 40, _wrong_type: 16, _out_of_range: 16, _unknown_key: 8, _missing_file: 8, _contradiction: 12,
        _preset: 12,
    }  # fmt: skip
    return chance.choices(list(kinds), list(kinds.values()))[0](chance, keys)


def _set(kind: str, *overrides: str) -> Mutation:
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    return Mutation(kind, overrides, tuple(word for key in keys for word in (key, key.rpartition(".")[2])))


def _valid(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    chosen = chance.sample(sorted(_VALID), chance.choice((1, 1, 2)))
    return _set("valid change", *(f"{key}={chance.choice(_VALID[key])}" for key in chosen))


def _wrong_type(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    return _set("wrong type", f"{chance.choice(sorted(keys))}={chance.choice(_WRONG)}")


def _out_of_range(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    numbers = [key for key, value in keys.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    return _set("other number", f"{chance.choice(sorted(numbers))}={chance.choice(_NUMBERS)}")


def _unknown_key(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    key = chance.choice(sorted(keys))
    section, _, name = key.rpartition(".")
    place = chance.randrange(len(name))
    changed = name[:place] + chance.choice("aexz_") + name[place + chance.choice((0, 1)) :]
    return _set("unknown key", f"{chance.choice(('', '', '+'))}{section}{'.' if section else ''}{changed}=1")


def _missing_file(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    key, file = chance.choice(_PATHS), chance.choice(_MISSING)
    mutated = _set("missing file", f"{key}={file}")
    return Mutation(mutated.kind, mutated.overrides, (*mutated.words, file))


def _contradiction(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    return _set("contradiction", *chance.choice(_CONTRADICTIONS))


def _preset(chance: random.Random, keys: Mapping[str, Any]) -> Mutation:
    key = chance.choice(sorted(_PRESETS))
    return _set("other choice", f"{key}={chance.choice(_PRESETS[key])}")
