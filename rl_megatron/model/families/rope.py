"""RoPE in a Hugging Face config, in the words of transformers 5, `rope_parameters`, and of transformers 4, `rope_theta`
and `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import LinearRope, Llama3Rope, ModelConfig, RopeScaling, YarnRope

# Of each kind: our section, and the keys that it has on both sides.
_KINDS: dict[str, tuple[type | None, frozenset[str]]] = {
    "default": (None, frozenset()),
    "linear": (LinearRope, frozenset({"factor"})),
    "llama3": (
        Llama3Rope,
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    ),
    "yarn": (
        YarnRope,
        frozenset(
            {
                "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "mscale",
                "mscale_all_dim", "attention_factor",
            }
        ),
    ),
}  # fmt: skip
_OF_ALL_KINDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
DEFAULT_BASE = 10_000.0


def read_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_base` and `rope_scaling` of the model section that a config.json describes.

    Raises: ConfigError naming what we have no maths for: another kind of scaling, a key that its kind does not have,
        rotation of a part of each head.
    """
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    parameters = dict(hf.get(key) or {})
    if hf.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    base = parameters.get("rope_theta") or hf.get("rope_theta") or DEFAULT_BASE
    return {"rope_base": float(base), "rope_scaling": read_scaling(parameters, key, hf["max_position_embeddings"])}


def read_scaling(parameters: Mapping[str, Any], where: str, max_position_embeddings: int) -> RopeScaling | None:
    """The scaling that one table of RoPE parameters, found at key `where`, describes."""
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ConfigError(
            f"{where}.partial_rotary_factor={parameters['partial_rotary_factor']}: only 1 is known here, RoPE on the "
            "whole of each head"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS:
        raise ConfigError(f"{where}.rope_type={kind}: known here are {', '.join(_KINDS)}")
    section, keys = _KINDS[kind]
    given = {key: value for key, value in parameters.items() if key not in _OF_ALL_KINDS and value is not None}
    foreign = sorted(given.keys() - keys)
    if foreign:
        raise ConfigError(f"{where}.{foreign[0]}={given[foreign[0]]}: RoPE scaling of type {kind} has no such key")
    if section is None:
        return None
    if "original_max_position_embeddings" in keys:
        given.setdefault("original_max_position_embeddings", max_position_embeddings)
    if "factor" not in given and kind == "yarn":
        given["factor"] = max_position_embeddings / given["original_max_position_embeddings"]
    if "factor" not in given:
        raise ConfigError(f"{where}.factor is missing: RoPE scaling of type {kind} needs it")
    try:  # a 0 is how some configs say that there is none
        return section(**{key: value for key, value in given.items() if value != 0 or key == "truncate"})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{where}.{wrong['loc'][-1]}={wrong['input']!r}: {wrong['msg']}") from error


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json for `model`'s RoPE, for transformers 5 and for what reads configs of transformers 4."""
    scaling = write_scaling(model.rope_scaling)
    return {
        "rope_parameters": {"rope_theta": model.rope_base, **(scaling or {"rope_type": "default"})},
        "rope_theta": model.rope_base,
        "rope_scaling": scaling,
    }


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys = {key: value for key, value in asdict(scaling).items() if value is not None}
    return {"rope_type": keys.pop("kind"), **keys}
