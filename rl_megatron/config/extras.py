"""Check, before a run begins, that the optional packages and the interpreters that its keys need exist."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from functools import cache

from rl_megatron.config.errors import ConfigError


def require_extra(where: str, extra: str, *packages: str, otherwise: str = "") -> None:
    """Check that packages are installed, without importing them.

    Args:
        where: What needs the packages, for the message: a key with its value, or a command.
        extra: The extra that installs them.
        packages: The names under which they are imported.
        otherwise: How to do without the packages, for the message, as in "leave it out".
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{where} needs the Python package {package}, which is not installed; "
                f"pip install 'rl_megatron[{extra}]'{', or ' if otherwise else ''}{otherwise}"
            )


_OLDEST = (3, 11)
_SECONDS = 60.0


@cache
def check_interpreter(python: str | None, key: str) -> None:
    """Check that an interpreter exists and that this package can run in it. Results are cached.

    None means this process's own interpreter. `key` is the configuration key, for messages.
    """
    if python is None:
        return
    where = f"{key}={python}"
    if shutil.which(python) is None:
        raise ConfigError(
            f"{where} is not an interpreter that can be run; make an environment with `python3 -m venv DIRECTORY`, and "
            f"set {key} to its bin/python"
        )
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        version = tuple(map(int, done.stdout.split()))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{where} is not a Python interpreter: {error}; set {key} to the bin/python of an environment"
        ) from error
    if len(version) != 2 or done.returncode != 0:
        raise ConfigError(
            f"{where} is not a Python interpreter: it prints {done.stdout or done.stderr!r:.80}; set {key} to the "
            "bin/python of an environment"
        )
    if version < _OLDEST:
        raise ConfigError(f"{where} is Python {version[0]}.{version[1]}, but 3.11 or newer is needed; name a newer one")
