"""The extras of setup.py: packages that only some keys need, looked for before a run begins."""

from __future__ import annotations

import importlib.util

from rl_megatron.config.errors import ConfigError


def require_extra(where: str, extra: str, *packages: str, otherwise: str = "") -> None:
    """Check that packages are installed, without importing them.

    Args:
        where: What needs them, for the message: a key with its value, or a command.
        extra: The extra that installs them.
        packages: The names that they are imported by.
        otherwise: How to do without them, for the message, as in "leave it out".

    Raises:
        ConfigError: One is missing.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{where} needs the Python package {package}, which is not installed; "
                f"pip install 'rl_megatron[{extra}]'{', or ' if otherwise else ''}{otherwise}"
            )
