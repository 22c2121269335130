r"""Read `\n` and `\t` in templates on the command line, where a line break cannot be typed easily."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TEMPLATES = ("data.prompt_template", "data.answer_template", "data.system_prompt")
_ESCAPE = re.compile(r"\\(\\?)([nt])")
_CHARACTERS = {"n": "\n", "t": "\t"}


def with_line_breaks(overrides: Iterable[str]) -> list[str]:
    r"""Return Hydra overrides in which the two characters `\n` of a template are a line break, and `\t` a tab.

    Another backslash in front keeps them: `\\n` becomes the two characters `\n`. YAML files are not changed, because
    YAML has its own way to write a line break.
    """
    return [_unescape(override) if _is_template(override) else override for override in overrides]


def _is_template(override: str) -> bool:
    key = override.partition("=")[0].lstrip("+")
    return key.endswith(_TEMPLATES) and (key in _TEMPLATES or key.startswith("stages."))


def _unescape(override: str) -> str:
    return _ESCAPE.sub(lambda match: f"\\{match[2]}" if match[1] else _CHARACTERS[match[2]], override)
