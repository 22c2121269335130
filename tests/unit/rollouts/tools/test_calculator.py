"""The tool `calculator` computes expressions, and nothing else."""

import pytest

from rl_megatron.rollouts.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"), ("(2+3)*4", "20"), ("-7 // 2", "-4"), ("7 % 4", "3"), ("6 / 2", "3"), ("1/3", repr(1 / 3)),
        ("2 ** 100", str(2**100)), ("2 ** -1", "0.5"), ("1e3", "1000"), ("0.1 + 0.2", "0.30000000000000004"),
        (" +5 ", "5"), ("(-8) ** 3", "-512"), ("1e300 * 1", "1e+300"), ("1 ** 10**9", "1"), ("0 ** 0", "1"),
    ],
)  # fmt: skip
def test_an_expression_has_its_value(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "divides by zero"), ("0 ** -1", "divides by zero"), ("2 ^ 3", r"\^ is not the power; write \*\*"),
        ("9 ** 9 ** 9", "too large"), ("10 ** 100000", "too large"), ("1e308 * 10", "too large"),
        ("(10 ** 2500) * (10 ** 2500)", "too large"), ("2.0 ** 5000", "too large"), ("1e999", "too large"),
        ("(-8) ** 0.5", "not a real number"), ("__import__('os')", "is not arithmetic"),
        ("a + 1", "'a' is not arithmetic"), ("True + 1", "is not arithmetic"), ("1j", "is not arithmetic"),
        ("'a' * 9", "is not arithmetic"), ("[1]", "is not arithmetic"), ("1,000", "is not arithmetic"),
        ("2 +", "not an arithmetic expression; write numbers"), ("", "not an arithmetic expression"),
        ("-" * 999 + "1", "not an arithmetic expression|has 1000 char|too large"),
        ("1+" * 500 + "1", "1001 characters, but may have at most 1000"), ("(" * 400 + "1" + ")" * 400, "not an arith"),
        ("10**400 * 1.5", "too large"),
    ],
)  # fmt: skip
def test_what_has_no_value_is_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        calculator(expression)
