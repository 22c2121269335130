"""Commands that a user can copy: Hydra reads each override's value as the same text."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from rl_megatron.config.commands import format_command, format_override


@pytest.mark.parametrize(
    "value",
    [
        "outputs/run", "a b", "a=b", "{x}", "null", "True", "123", "1e3", "1_000", "nan", "-inf", "0.5", "step-0004",
        "a,b", "[x", r"{q}\n", "a\nb", 'say "x"', "it's", "back\\", 'x\\"y', 'x\\\\"', "",
    ],
)  # fmt: skip
def test_an_override_is_read_as_the_same_text(value):
    (parsed,) = OverridesParser.create().parse_overrides([format_override("init_from", value)])
    assert parsed.value() == value and isinstance(parsed.value(), str)


def test_a_command_is_quoted_for_a_shell():
    assert format_command("train", format_override("init_from", "a b")) == "rl-megatron train 'init_from=\"a b\"'"
