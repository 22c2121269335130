"""The reward function `math_verify`: the completion's mathematical answer equals the reference answer.

The library math-verify parses LaTeX and compares expressions. It limits its own time by a signal, which only the main
thread of a process can receive; reward functions run there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.rewards.registry import register_reward


@register_reward("math_verify")
@dataclass(frozen=True)
class MathVerify:
    r"""1 if math-verify finds the answer in the completion and says that it equals the reference answer, otherwise 0.

    A reference answer that it cannot read as it is, such as `\frac{1}{2}`, is read within `\boxed{}`.

    Args:
        parsing_seconds: How long it may take to read one text.
        verify_seconds: How long one comparison may take.

    Raises:
        ConfigError: math-verify is not installed.
    """

    parsing_seconds: int = 5
    verify_seconds: int = 5

    def __post_init__(self) -> None:
        try:
            import math_verify  # noqa: F401  # here, because most runs do without it
        except ImportError as error:
            raise ConfigError(
                f"the reward function 'math_verify' needs the library math-verify ({error}): pip install "
                "'rl_megatron[rewards]'"
            ) from error

    def __call__(self, completion: str, answer: str) -> float:
        """Return the score of a completion.

        Raises:
            ValueError: The reference answer cannot be read.
            TimeoutError: Reading the completion, or comparing it, took too long.
        """
        gold = self._parsed(str(answer)) or self._parsed(rf"\boxed{{{answer}}}")
        if not gold:
            raise ValueError(f"math-verify cannot read the reference answer {answer!r}")
        return float(self._equal(gold, self._parsed(completion)))

    def _parsed(self, text: str) -> list[Any]:
        from math_verify import parse
        from math_verify.errors import TimeoutException

        try:
            return parse(text, parsing_timeout=self.parsing_seconds, raise_on_error=True)
        except TimeoutException as error:
            raise TimeoutError(f"math-verify read for {self.parsing_seconds} seconds") from error
        except Exception:  # the library's own default: what it cannot read is no answer
            return []

    def _equal(self, gold: list[Any], given: list[Any]) -> bool:
        from math_verify import verify
        from math_verify.errors import TimeoutException

        try:
            return verify(gold, given, timeout_seconds=self.verify_seconds, raise_on_error=True)
        except TimeoutException as error:
            raise TimeoutError(f"math-verify compared for {self.verify_seconds} seconds") from error
        except Exception:  # the library's own default: what it cannot compare is unequal, and other pairs may be equal
            return verify(gold, given, timeout_seconds=self.verify_seconds)
