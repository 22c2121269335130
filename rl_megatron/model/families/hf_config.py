"""A config.json, read strictly: what a family does not read may not change the maths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError

# Of the file, of training, of generation, of tokenizers, of software: none changes what the weights compute.
_HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
        "attention_dropout", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
        "is_llama_config", "max_window_layers", "model_max_length", "model_type", "name_or_path",
        "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef", "tokenizer_class",
        "tokenizer_padding_side", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id",
        "unsloth_fixed", "unsloth_version", "use_cache",
        # RoPE, which has two dialects: a family reads the one that it finds first.
        "rope_parameters", "rope_scaling", "rope_theta",
    }
)  # fmt: skip


class HFConfig(Mapping[str, Any]):
    """The keys of a config.json, found at `where`. Remembers which of them were asked for.

    Raises: ConfigError where a key is asked for by `[…]` that the file lacks.
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
        return self._values[key] if key in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def refuse_unread(self, ignored: frozenset[str] = frozenset()) -> None:
        """Raises: ConfigError naming a key that nobody asked for, unless it is harmless, here or in the family, which
        `ignored` tells; off (null, false, 0, empty); a setting of generation; or at the default of transformers' class,
        which the family's maths is that of."""
        seen = self._read | _HARMLESS | ignored
        unread = {key: value for key, value in self._values.items() if key not in seen and value}
        if not unread:
            return
        known = _known_to_transformers(str(self._values.get("model_type")))
        for key, value in unread.items():
            if key not in known or (known[key] is not _ANY and known[key] != value):
                raise ConfigError(
                    f"{self._where}: {key}={value!r} is not understood here, and may change what the model computes; "
                    "if it does not, delete it from the file"
                )


_ANY = object()


def _known_to_transformers(model_type: str) -> dict[str, Any]:
    """Keys whose values are known to be harmless: the defaults of the model's class, and any for generation."""
    from transformers import CONFIG_MAPPING, GenerationConfig

    defaults = CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}
    return defaults | dict.fromkeys(GenerationConfig().to_dict(), _ANY)


def only(hf: Mapping[str, Any], **known: Any) -> None:
    """Raises: ConfigError where a key that changes the maths is set to another value than the one there is maths for.
    A key that is missing or null has that value."""
    for key, value in known.items():
        if hf.get(key) not in (None, value):
            raise ConfigError(f"config.json: {key}={hf[key]!r} is not supported; {key}={value!r} is")
