"""The settings of tools: functions that the policy calls in its turns."""

from __future__ import annotations

from typing import Literal

from rl_megatron.config.field_types import Positive, PositiveFloat, section


@section
class ToolsConfig:
    """Functions that the policy may call in its turns, and the processes that run them."""

    # The functions: names of tools of the package (calculator, python) or of a plugin, and import strings as in
    # `my_tools.py:search`. Empty: no tools.
    functions: tuple[str, ...] = ()
    # How the model writes a call. auto: as the text of the chat template says. hermes: also Qwen 2.5 and Qwen 3. qwen:
    # the XML of Qwen3-Coder. llama: the JSON of Llama 3.1. pythonic: Llama 4 and the small models of Llama 3.2.
    format: Literal["auto", "hermes", "qwen", "llama", "mistral", "pythonic"] = "auto"
    # What a call does that fails or cannot be read. answer: the model gets the text of the error. end: the trajectory
    # ends and counts as truncated. fail: the trajectory fails, as if the rollout worker had raised an error.
    on_error: Literal["answer", "end", "fail"] = "answer"
    max_calls: Positive = 8  # calls of one turn that are run; each further one is an error
    seconds_per_call: PositiveFloat = 10.0  # how long one call may take
    max_answer_characters: Positive = 8192  # a longer answer is cut, and says so
    processes: Positive = 2  # processes that run the functions
    memory_mb: Positive = 1024  # memory of one of these processes, and of the programs of the tool python, in MiB
