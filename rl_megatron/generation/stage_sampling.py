"""Turn a stage's generation section into sampling settings."""

from __future__ import annotations

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.stop_strings import StopStrings


def make_sampling(
    stage: StageConfig, tokenizer: Tokenizer, greedy: bool = False, end_of_turn_ids: tuple[int, ...] = ()
) -> Sampling:
    """Return the stage's sampling settings, with stop tokens as ids.

    `greedy` ignores temperature, top_k and top_p. `end_of_turn_ids`, with which the chat template ends a turn, end a
    completion as well.

    Raises:
        ConfigError: A stop token is not exactly one token.
    """
    generation = stage.generation
    stop_ids = [tokenizer.eos_id, *end_of_turn_ids]
    for text in generation.stop_tokens:
        ids = tokenizer.encode_special(text).ids
        if len(ids) != 1:
            raise ConfigError(
                f"generation.stop_tokens: {text!r} is {len(ids)} tokens of this tokenizer; each must be exactly one: "
                "set generation.stop_strings for a text of several tokens"
            )
        stop_ids += ids
    texts = generation.stop_strings
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=0.0 if greedy else generation.temperature,
        top_k=0 if greedy else generation.top_k,
        top_p=1.0 if greedy else generation.top_p,
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        stop_strings=StopStrings(texts, tokenizer.definition) if texts else None,
    )
