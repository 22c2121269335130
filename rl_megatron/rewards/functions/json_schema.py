"""The reward function `json_schema`: the completion is JSON that a schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.rewards.registry import register_reward

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


@register_reward("json_schema")
@dataclass(frozen=True)
class JsonSchema:
    """1 if the completion is JSON that the schema allows, otherwise 0. Its metric `is_json` tells the two apart.

    If the completion has blocks in code fences, the last one is read instead of the whole.

    Args:
        schema: A JSON schema, as a mapping or as the path of a file.

    Raises:
        ConfigError: The library jsonschema is not installed.
        ValueError: The schema is not a valid schema.
    """

    schema: Mapping[str, Any] | str

    def __post_init__(self) -> None:
        try:
            from jsonschema import SchemaError
        except ImportError as error:
            raise ConfigError(
                f"the reward function 'json_schema' needs the library jsonschema ({error}): pip install "
                "'rl_megatron[rewards]'"
            ) from error
        try:
            self._validator  # noqa: B018  # a wrong schema is found before the first step
        except (SchemaError, OSError, json.JSONDecodeError) as error:
            raise ValueError(f"schema: {' '.join(str(error).split())[:200]}") from error

    @cached_property
    def _validator(self) -> Any:
        from jsonschema.validators import validator_for

        schema = json.loads(Path(self.schema).read_text()) if isinstance(self.schema, str) else dict(self.schema)
        kind = validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    def __call__(self, completion: str) -> dict[str, float]:
        """Return the score of a completion, and whether it is JSON."""
        fenced = _FENCED.findall(completion)
        try:
            value = json.loads(fenced[-1] if fenced else completion)
        except (json.JSONDecodeError, RecursionError):
            return {"score": 0.0, "is_json": 0.0}
        return {"score": float(self._validator.is_valid(value)), "is_json": 1.0}
