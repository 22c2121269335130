"""Import users' code. An error that it raises becomes a message of one line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rl_megatron.config.errors import ConfigError

_T = TypeVar("_T")


def imported(where: str, name: str, load: Callable[[], Any], missing: str) -> Any:
    """Return `load()`, which imports users' code.

    Args:
        where: The key or the file that names the code, for messages.
        name: The module or file, for messages.
        load: The import.
        missing: What to say if the module `name` itself does not exist.

    Raises:
        ConfigError: There is no such module, or importing it raises.
    """
    try:
        return load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and a script may exit
        if isinstance(error, ModuleNotFoundError) and error.name is not None and _is_within(name, error.name):
            raise ConfigError(f"{where}: there is no module {error.name!r}; {missing}") from error
        raise ConfigError(f"{where}: importing {name!r} {raised(error, name)}") from error


def user_code(where: str, call: Callable[[], _T]) -> _T:
    """Return `call()`, which runs users' code.

    Args:
        where: The key that names the code, with its value, for the message.
        call: The call.

    Raises:
        ConfigError: The code raised an error.
    """
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{where} {raised(error)}") from error


def raised(error: BaseException, file: str | None = None) -> str:
    """Return "raised TypeError: message (file:line)" for an error of users' code.

    Args:
        error: The error.
        file: The user's file, to give the line where the error passed it. By default, the last line is given.
    """
    said = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {said} ({_place(error, file)})"


def refuse_another(where: str, module: ModuleType, directory: Path) -> None:
    """Refuse an installed module that hides a module of the same name in the user's directory.

    Args:
        where: The key or the file that names the module, for the message.
        module: What the name stands for.
        directory: The user's directory.

    Raises:
        ConfigError: The directory has a module of this name, and `module` is another.
    """
    top = module.__name__.partition(".")[0]
    if not (directory / f"{top}.py").is_file() and not (directory / top / "__init__.py").is_file():
        return
    places = [module.__file__] if module.__file__ else list(getattr(module, "__path__", ()))
    if not any(Path(place).resolve().is_relative_to(directory) for place in places):
        raise ConfigError(
            f"{where}: {module.__name__!r} is {', '.join(places)}, and not the module of this name in {directory}, "
            "which it hides; rename the one in the directory"
        )


def _place(error: BaseException, name: str | None) -> str:
    """Return file:line where an error was raised: in the file `name` if it passed there, otherwise in the last file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if frame.filename == name), frames[-1])
    return f"{last.filename}:{last.lineno}"


def _is_within(name: str, missing: str) -> bool:
    """Return whether `missing` is the module `name` or one of its parents."""
    return name == missing or name.startswith(f"{missing}.")
