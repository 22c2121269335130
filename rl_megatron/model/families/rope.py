"""RoPE in a Hugging Face config, in the keys of transformers 5 and of transformers 4.

Transformers 5 has `rope_parameters`; transformers 4 has `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import LinearRope, Llama3Rope, ModelConfig, RopeScaling, YarnRope

# For each kind of scaling: this package's settings class, and the keys that it shares with config.json.
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
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
DEFAULT_BASE = 10_000.0


def read_rope(
    hf: Mapping[str, Any], share: float | None = None, ignored: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return `rope_base` and `rope_scaling` of the model section that a config.json describes.

    Args:
        hf: The content of the config.json.
        share: The default of `partial_rotary_factor` in a family that may rotate a part of each head. The result then
            has this key, too. None for a family that rotates whole heads.
        ignored: Keys of RoPE that do not change what this family computes.
    """
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    parameters = {name: value for name, value in (hf.get(key) or {}).items() if name not in ignored}
    if hf.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    rotated = {}
    if share is not None:
        rotated = {"partial_rotary_factor": float(parameters.pop("partial_rotary_factor", None) or share)}
    base = parameters.get("rope_theta") or hf.get("rope_theta") or DEFAULT_BASE
    scaling = read_scaling(parameters, key, hf["max_position_embeddings"])
    return {"rope_base": float(base), "rope_scaling": scaling, **rotated}


def read_scaling(parameters: Mapping[str, Any], where: str, max_position_embeddings: int) -> RopeScaling | None:
    """Return the scaling that one table of RoPE parameters describes, or None if it describes RoPE without scaling.

    `where` is the table's key in config.json, for messages. `max_position_embeddings` is the default of the original
    context length, and YaRN's default factor is their ratio.
    """
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ConfigError(
            f"{where}.partial_rotary_factor={parameters['partial_rotary_factor']} is not supported; it must be 1, so "
            "that RoPE rotates whole heads"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS:
        raise ConfigError(f"{where}.rope_type={kind} is not supported; supported types: {', '.join(_KINDS)}")
    section, keys = _KINDS[kind]
    settings = {key: value for key, value in parameters.items() if key not in _COMMON_KEYS and value is not None}
    foreign = sorted(settings.keys() - keys)
    if foreign:
        raise ConfigError(f"{where}.{foreign[0]}={settings[foreign[0]]}: RoPE scaling of type {kind} has no such key")
    if section is None:
        return None
    if "original_max_position_embeddings" in keys:
        settings.setdefault("original_max_position_embeddings", max_position_embeddings)
    if "factor" not in settings and kind == "yarn":
        settings["factor"] = max_position_embeddings / settings["original_max_position_embeddings"]
    if "factor" not in settings:
        raise ConfigError(f"{where}.factor is missing: RoPE scaling of type {kind} needs it")
    try:  # some configs write 0 for a missing parameter
        return section(**{key: value for key, value in settings.items() if value != 0 or key == "truncate"})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{where}.{wrong['loc'][-1]}={wrong['input']!r}: {wrong['msg']}") from error


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for the model's RoPE, in the notations of transformers 5 and transformers 4."""
    scaling, share = write_scaling(model.rope_scaling), model.partial_rotary_factor
    rotated = {} if share == 1.0 else {"partial_rotary_factor": share}
    return {
        "rope_parameters": {"rope_theta": model.rope_base, **(scaling or {"rope_type": "default"}), **rotated},
        "rope_theta": model.rope_base,
        "rope_scaling": scaling,
    }


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the table of RoPE parameters for `scaling`, without `rope_theta`, or None if `scaling` is None."""
    if scaling is None:
        return None
    keys = {key: value for key, value in asdict(scaling).items() if value is not None}
    return {"rope_type": keys.pop("kind"), **keys}
