"""Models that read images, and whose text model belongs to one of the families.

Such a model's config.json has the text model's keys in `text_config`, and the text model's tensor names have a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.model.families.hf_config import HFConfig

_TEXT = "text_config"
# Keys beside text_config that are only about images.
_IMAGE_KEYS = frozenset(
    {
        "boi_token_index", "eoi_token_index", "image_token_id", "image_token_index", "mm_tokens_per_image",
        "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "video_token_id", "vision_config",
        "vision_end_token_id", "vision_feature_layer", "vision_start_token_id",
    }
)  # fmt: skip
# Prefixes of tensor names, in files of transformers 5 and in older ones → prefixes in the text model alone.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_IMAGE_PREFIXES = tuple(
    f"{model}{part}." for model in ("model.", "") for part in ("visual", "vision_tower", "multi_modal_projector")
)
_POSITIONS = "mrope_"  # RoPE's keys about positions in an image; a text token has the same position in all sections
_ROPES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class WithImages:
    """The models that read images and have a text model of one family.

    Attributes:
        architecture: Their name in `architectures` of a config.json.
        text_type: The `model_type` of their `text_config`.
        model_type: The `model_type` of the text model alone, or None if it is `text_type`.
        defaults: Keys that `text_config` may lack, with transformers' default values.
    """

    architecture: str
    text_type: str
    model_type: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def text_config(self, hf_config: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
        """Return the config.json of the text model alone, given that of a model that reads images.

        `architecture` is the text model's. A key outside `text_config` that may change the text model is refused.
        """
        whole = HFConfig(hf_config, where)
        text = whole[_TEXT]
        if not isinstance(text, Mapping):
            raise ConfigError(f"{where}: {_TEXT}={text!r} is not an object")
        if text.get("model_type") != self.text_type:
            raise ConfigError(
                f"{where}: {_TEXT}.model_type={text.get('model_type')!r} is not supported; {self.architecture} is "
                f"read with {self.text_type!r}"
            )
        # As in transformers, tie_word_embeddings outside text_config overrides the one inside.
        tied = {key: whole[key] for key in ("tie_word_embeddings",) if key in whole}
        whole.refuse_unread(_IMAGE_KEYS)
        config = {**self.defaults, **text, **tied, "architectures": [architecture]}
        if self.model_type is None:
            return config
        for key in (key for key in _ROPES if config.get(key)):
            config[key] = {name: value for name, value in config[key].items() if not name.startswith(_POSITIONS)}
        return config | {"model_type": self.model_type}


def text_name(hf_name: str) -> str:
    """Return the name that a tensor has in the text model alone."""
    for prefix, text_prefix in _PREFIXES.items():
        if hf_name.startswith(prefix):
            return text_prefix + hf_name.removeprefix(prefix)
    return hf_name


def is_of_images(hf_name: str) -> bool:
    """Return whether a tensor belongs to the part of the model that only images need."""
    return hf_name.startswith(_IMAGE_PREFIXES)
