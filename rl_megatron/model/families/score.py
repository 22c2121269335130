"""Hugging Face's sequence classifiers of one label: a family's decoder with a score head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.model.families.family import FAMILIES, Family
from rl_megatron.model.families.table import Rows, WeightTable

_LANGUAGE_MODEL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
_OTHER_NAMES = {
    "Gemma3ForCausalLM": "Gemma3TextForSequenceClassification",
    "Qwen3_5ForCausalLM": "Qwen3_5TextForSequenceClassification",
}
_HF_HEAD, _HEAD = "score.weight", "output_layer.weight"
# transformers has no sequence classifier of these families.
_WITHOUT_CLASSIFIER = ("Glm4MoeForCausalLM", "Qwen3_5MoeForCausalLM")
# Keys about a classifier's labels. With one label, the classifier's output is the score, whatever the problem type is.
_LABEL_KEYS = ("id2label", "label2id", "num_labels", "problem_type")


def name_classifier(family: Family) -> str:
    """Return the architecture of the family's sequence classifier."""
    return _OTHER_NAMES.get(family.architecture, family.architecture.replace(_LANGUAGE_MODEL, _CLASSIFIER))


def describe_decoder(hf_config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the config.json of the language model that has the same decoder as a classifier of one label."""
    named = hf_config.get("architectures") or []
    supported = (family for family in FAMILIES.values() if family.architecture not in _WITHOUT_CLASSIFIER)
    decoders = {name_classifier(family): family.architecture for family in supported}
    classifier = next((name for name in named if name in decoders), None)
    if classifier is None:
        raise ConfigError(
            f"{where}: architectures={list(named)} has no score head that can be read; supported architectures of "
            f"reward models: {', '.join(decoders)}"
        )
    labels = hf_config.get("num_labels", len(hf_config.get("id2label", {0: 0, 1: 1})))  # transformers' default is two
    if labels != 1:
        raise ConfigError(f"{where}: the model has {labels} labels, but a reward model has one score (num_labels=1)")
    rest = {key: value for key, value in hf_config.items() if key not in _LABEL_KEYS}
    return rest | {"architectures": [decoders[classifier]]}


def describe_classifier(hf_config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config.json of the classifier of one label that has a language model's decoder.

    transformers reads the score at the last token that is not padding. If answers end with the padding token, the
    config.json gets no `pad_token_id`. transformers then reads the last token, and refuses a batch of several
    sequences.
    """
    if family.architecture in _WITHOUT_CLASSIFIER:
        raise ConfigError(
            f"transformers has no class {name_classifier(family)}, so a reward model of this family cannot be "
            "exported; use its checkpoint as it is"
        )
    ends = hf_config.get("eos_token_id")
    if hf_config.get("pad_token_id") in (ends if isinstance(ends, list) else [ends]) and ends is not None:
        log.once(
            "the score is read at the token that ends answers, but the tokenizer also pads with it, so the exported "
            "model has no pad_token_id: transformers scores one sequence at a time, unless you set pad_token_id to a "
            "token that ends no answer"
        )
        hf_config = {**hf_config, "pad_token_id": None}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**hf_config, "architectures": [name_classifier(family)], **labels}


def build_score_table(table: WeightTable, hidden_size: int) -> WeightTable:
    """Return the weight table of the model with a score head, [1, hidden_size], instead of an output layer."""
    dropped = {rows.hf_name for rows in table.by_name.get(_HEAD, ())}
    hf_shapes = {name: shape for name, shape in table.hf_shapes.items() if name not in dropped}
    shapes = {name: shape for name, shape in table.shapes.items() if name != _HEAD}
    rows = tuple(rows for rows in table.rows if rows.name != _HEAD)
    return replace(
        table,
        hf_shapes=hf_shapes | {_HF_HEAD: (1, hidden_size)},
        shapes=shapes | {_HEAD: (1, hidden_size)},
        rows=(*rows, Rows(_HF_HEAD, 0, _HEAD, 0, 1)),
    )
