"""Reward functions for sums: one for a single completion, one for all completions of a step, in TRL's form."""

import re


def contains(completion: str, answer: str) -> dict[str, float]:
    """Return 1 if the reference answer is one of the numbers in the completion."""
    numbers = re.findall(r"\d+", completion)
    return {"score": float(answer in numbers), "numbers": float(len(numbers))}


def variety(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Return 1 for a completion that no other completion of the step equals."""
    return [float(completions.count(completion) == 1) for completion in completions]
