"""A tool is a function with type hints, and a docstring that describes its arguments."""


def calculator(expression: str) -> int:
    """Compute a sum.

    Args:
        expression: Numbers with a plus sign between them.
    """
    return sum(int(number) for number in expression.split("+"))
