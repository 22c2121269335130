"""Turn a stage's generation section into sampling settings, and check that prompts with completions fit the model."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.tasks import Problem
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import prompt_ids
from rl_megatron.generation.interfaces import Sampling


def stage_sampling(stage: StageConfig, tokenizer: Tokenizer, greedy: bool = False) -> Sampling:
    """Return the stage's sampling settings, with stop tokens as ids.

    Args:
        stage: The stage.
        tokenizer: The run's tokenizer.
        greedy: Whether to ignore temperature, top_k and top_p and sample greedily.

    Raises:
        ConfigError: A stop string is not exactly one token.
    """
    generation = stage.generation
    stop_ids = [tokenizer.eos_id]
    for text in generation.stop_tokens:
        ids = tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(
                f"generation.stop_tokens: {text!r} is {len(ids)} tokens of this tokenizer; each must be exactly one"
            )
        stop_ids += ids
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=0.0 if greedy else generation.temperature,
        top_k=0 if greedy else generation.top_k,
        top_p=1.0 if greedy else generation.top_p,
        stop_ids=tuple(stop_ids),
    )


def check_completions_fit(stage: StageConfig, problems: Sequence[Problem], tokenizer: Tokenizer) -> int:
    """Return the number of tokens of the longest prompt with its longest completion.

    Raises:
        ConfigError: A prompt with its completion may exceed the model's longest sequence.
    """
    different = {problem.prompt: problem for problem in problems}.values()
    longest = max((len(prompt_ids(problem, tokenizer)) for problem in different), default=0)
    wanted, limit = stage.generation.max_new_tokens, stage.model.max_sequence_length
    if longest + wanted > limit:
        raise ConfigError(
            f"generation.max_new_tokens={wanted} and the longest prompt, {longest} tokens, together exceed "
            f"model.max_sequence_length={limit}; lower the one or raise the other"
        )
    return longest + wanted
