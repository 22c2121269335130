"""The reward function `gsm8k`: the number after the last `####` is that of the reference answer."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from rl_megatron.data.tasks.gsm8k import extract_answer
from rl_megatron.rewards.registry import register_reward


@register_reward("gsm8k")
def gsm8k(completion: str, answer: str) -> float:
    """Return 1 if the number after the last `####` is that of the reference answer (18 = 18.0), otherwise 0.

    Args:
        completion: The completion.
        answer: A number, or a solution that ends in `#### N`.

    Raises:
        ValueError: The reference answer is neither.
    """
    given = extract_answer(completion)
    return float(given is not None and given == _reference(str(answer)))


def _reference(answer: str) -> Decimal:
    found = extract_answer(answer)
    if found is not None:
        return found
    try:
        return Decimal(answer.strip().replace(",", "").removeprefix("$"))
    except InvalidOperation:
        raise ValueError(f"the reference answer {answer!r} is no number and does not end in '#### N'") from None
