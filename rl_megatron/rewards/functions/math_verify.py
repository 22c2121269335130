"""The reward function `math_verify`: the completion's mathematical answer equals the reference answer."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.data.math_answers import are_equal, read_answer, read_reference, require_math_verify
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
        require_math_verify("the reward function 'math_verify'")

    def __call__(self, completion: str, answer: str) -> float:
        """Return the score of a completion.

        Raises:
            ValueError: The reference answer cannot be read.
            TimeoutError: Reading the completion, or comparing it, took too long.
        """
        reference = read_reference(str(answer), self.parsing_seconds)
        return float(are_equal(reference, read_answer(completion, self.parsing_seconds), self.verify_seconds))
