"""Strict reading of a config.json: a key that a family does not read must not change what the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError

# Keys about the file, training, generation, tokenizers or software. None changes what the weights compute.
_HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
        "attention_dropout", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
        "is_llama_config", "max_window_layers", "model_max_length", "model_type", "name_or_path",
        "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef", "tokenizer_class",
        "tokenizer_padding_side", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id",
        "unsloth_fixed", "unsloth_version", "use_cache",
        # RoPE has two notations. A family reads the one that it finds first.
        "rope_parameters", "rope_scaling", "rope_theta",
    }
)  # fmt: skip


class HFConfig(Mapping[str, Any]):
    """A config.json that records which of its keys are read. Reading a missing key raises ConfigError.

    `where` names the file in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise ConfigError(f"{self._where} has no {key!r}, which its architecture needs")
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if the file lacks it."""
        return self._values[key] if key in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def refuse_unread(self, ignored: frozenset[str] = frozenset()) -> None:
        """Refuse a key that was not read, unless it is known not to change what the model computes.

        A key may stay unread if it is harmless in every family (`_HARMLESS`) or in this one (`ignored`), if it is off
        (null, false, 0, empty), if it is a generation setting, or if it has the default value of the transformers
        class, for which the family is written.
        """
        seen = self._read | _HARMLESS | ignored
        unread = {key: value for key, value in self._values.items() if key not in seen and value}
        if not unread:
            return
        harmless = _find_harmless_values(str(self._values.get("model_type")))
        for key, value in unread.items():
            if key not in harmless or (harmless[key] is not _ANY and harmless[key] != value):
                raise ConfigError(
                    f"{self._where}: {key}={value!r} is not supported, and may change what the model computes; if it "
                    "does not, delete the key from the file"
                )


_ANY = object()


def _find_harmless_values(model_type: str) -> dict[str, Any]:
    """Return the harmless value of each key: the default of the model's class, or _ANY for generation settings."""
    from transformers import CONFIG_MAPPING, GenerationConfig

    defaults = CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}
    return defaults | dict.fromkeys(GenerationConfig().to_dict(), _ANY)


def require_only(hf: Mapping[str, Any], **supported: Any) -> None:
    """Refuse a config.json in which a key does not have the only supported value.

    A key that is missing or null counts as having the supported value.
    """
    for key, value in supported.items():
        if hf.get(key) not in (None, value):
            raise ConfigError(f"config.json: {key}={hf[key]!r} is not supported; {key}={value!r} is")
