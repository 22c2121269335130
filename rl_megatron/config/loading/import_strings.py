"""Import strings: `file.py:name` or `package.module:name` stands for a user's class or function.

A configuration may use one where it selects a loss, a task, an advantage estimator, a reward function, a rollout worker
or an environment, so that users need no plugin module. A file is imported once, under a name that follows from its
absolute path. Its directory is added at the end of `sys.path`, so that the file can import its neighbours but none of
them hides an installed module.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rl_megatron.config.errors import ConfigError, nearest

_T = TypeVar("_T")


def import_user_code(where: str, name: str, load: Callable[[], object], missing: str) -> Any:
    """Return `load()`, which imports users' code. Any error becomes a ConfigError.

    Args:
        where: The key or the file that names the code, for messages.
        name: The module or file, for messages.
        load: The function that imports.
        missing: The end of the message if the module `name` itself does not exist.
    """
    try:
        return load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and a script may exit
        if isinstance(error, ModuleNotFoundError) and error.name is not None and _is_within(name, error.name):
            raise ConfigError(f"{where}: there is no module {error.name!r}; {missing}") from error
        raise ConfigError(f"{where}: importing {name!r} {describe_user_error(error, name)}") from error


def run_user_code(where: str, call: Callable[[], _T]) -> _T:
    """Return `call()`, which runs users' code. Any error becomes a ConfigError that begins with `where`."""
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{where} {describe_user_error(error)}") from error


def describe_user_error(error: BaseException, file: str | None = None) -> str:
    """Return "raised TypeError: message (file:line)" for an error of users' code.

    The line is the traceback's last line in `file`, or its last line if none is in `file`.
    """
    message = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {message} ({_locate_error(error, file)})"


def refuse_another(where: str, module: ModuleType, directory: Path) -> None:
    """Refuse an installed `module` that hides a module of the same name in the user's directory."""
    top = module.__name__.partition(".")[0]
    if not (directory / f"{top}.py").is_file() and not (directory / top / "__init__.py").is_file():
        return
    paths = [module.__file__] if module.__file__ else list(getattr(module, "__path__", ()))
    if not any(Path(path).resolve().is_relative_to(directory) for path in paths):
        raise ConfigError(
            f"{where}: {module.__name__!r} is {', '.join(paths)}, and not the module of this name in {directory}, "
            "which it hides; rename the one in the directory"
        )


def _locate_error(error: BaseException, name: str | None) -> str:
    """Return file:line of the traceback's last line in the file `name`, or of its last line if none is there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if frame.filename == name), frames[-1])
    return f"{last.filename}:{last.lineno}"


def _is_within(name: str, missing: str) -> bool:
    """Return whether `missing` is the module `name` or one of its parents."""
    return name == missing or name.startswith(f"{missing}.")


_KEYS = (
    "loss.name",
    "data.task.name",
    "data.task.environment",
    "data.mix_weights",
    "algorithm.advantage_estimator",
    "rollout.worker",
    "rollout.environment.name",
    "rollout.tools.functions",
    "rollout.agent.tool_format",
)  # the keys whose value may be an import string or a list of them
_files: dict[str, str] = {}  # the names of modules that were imported from files → their files
_FORM = "write file.py:name or package.module:name"


def is_import_string(text: object) -> bool:
    """Return whether `text` is meant as an import string and not as a registered name."""
    return isinstance(text, str) and (":" in text or text.endswith(".py"))


def load_object(text: str, where: str, config_dir: str | os.PathLike[str] | None = None) -> Any:
    """Return the class or function that an import string names.

    Args:
        text: "file.py:name" or "package.module:name". The name may have dots, as in "file.py:Rewards.length". A file is
            relative to the working directory or, if it is not there, to `config_dir`.
        where: The configuration key, for messages.
        config_dir: The user's config directory, whose modules can be imported too.
    """
    source, name = _split(text, where)
    if source.endswith(".py"):
        module = _import_file(find_file(source, where, config_dir), where)
    else:
        module = _import_module(source, where, config_dir)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [key for key in vars(target) if not key.startswith("_")] if hasattr(target, "__dict__") else []
            raise ConfigError(f"{where}={text!r}: {source} has no {part!r}{nearest(part, names)}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{where}={text!r} is the {type(target).__name__} {target!r}; name a function or a class")
    return target


def imported_files() -> dict[str, str]:
    """Return the files that import strings have named so far, by module name."""
    return dict(_files)


def find_files(files: Mapping[str, str]) -> None:
    """Let `import` find the modules of another process's `imported_files`, so that its pickled objects load."""
    sys.meta_path.append(_FileFinder(files))


class _FileFinder(MetaPathFinder):
    """A finder of modules that import strings named in another process."""

    def __init__(self, files: Mapping[str, str]):
        self._files = dict(files)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module in these files, or None for another module."""
        file = self._files.get(fullname)
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)


def make_string_absolute(text: str, where: str, config_dir: str | os.PathLike[str] | None = None) -> str:
    """Return the import string with its file's absolute path, so that it is valid in any working directory."""
    source, name = _split(text, where)
    if config_dir is not None:
        add_to_path(Path(config_dir).resolve())  # a module of this directory may be imported later
    return f"{find_file(source, where, config_dir)}:{name}" if source.endswith(".py") else text


def make_absolute(tree: Mapping[str, object], config_dir: str | os.PathLike[str] | None) -> None:
    """Make the paths in the import strings of a configuration and its stages absolute, in place."""
    stages = tree.get("stages")
    stages = stages if isinstance(stages, Mapping) else {}
    sections = {"": tree, **{f"stages.{name}.": stage for name, stage in stages.items()}}
    for prefix, section in sections.items():
        for path in _KEYS:
            *above, key = path.split(".")
            holder: object = section
            for part in above:
                holder = holder.get(part) if isinstance(holder, dict) else None
            if isinstance(holder, dict) and is_import_string(holder.get(key)):
                holder[key] = make_string_absolute(holder[key], f"{prefix}{path}", config_dir)
            elif isinstance(holder, dict) and isinstance(holder.get(key), list):
                holder[key] = [
                    make_string_absolute(item, f"{prefix}{path}[{index}]", config_dir)
                    if is_import_string(item)
                    else item
                    for index, item in enumerate(holder[key])
                ]


def find_file(file: str, where: str, config_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute path of a user's file, which is relative to the working directory or to `config_dir`."""
    path = Path(file).expanduser()
    directories = [Path.cwd(), *([] if config_dir is None else [Path(config_dir)])]
    candidates = [Path(os.path.abspath(directory / path)) for directory in directories]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " nor ".join(dict.fromkeys(str(candidate) for candidate in candidates))
    raise ConfigError(
        f"{where}: there is no file {looked}; a file is relative to the working directory or --config-dir"
    )


def _split(text: str, where: str) -> tuple[str, str]:
    """Return (file or module, name)."""
    source, colon, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not colon and text.endswith(".py"):
        raise ConfigError(f"{where}={text!r} has no name; write {text}:NAME, a class or function of the file")
    if not source or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{where}={text!r} is not an import string; {_FORM}")
    if not source.endswith(".py") and not all(part.isidentifier() for part in source.split(".")):
        raise ConfigError(f"{where}={text!r}: {source!r} is neither a .py file nor a module path; {_FORM}")
    return source, name


def _import_module(name: str, where: str, config_dir: str | os.PathLike[str] | None) -> ModuleType:
    if config_dir is not None:
        add_to_path(Path(config_dir).resolve())
    file = Path(f"{name.replace('.', '/')}.py")
    missing = f"a module must be installed, or in the directory of --config-dir; write a file as in {file}:NAME"
    module = import_user_code(where, name, lambda: importlib.import_module(name), missing)
    if config_dir is not None:
        refuse_another(where, module, Path(config_dir).resolve())
    return module


def _import_file(file: Path, where: str) -> ModuleType:
    """Import a file, unless it has been imported."""
    file = file.resolve()
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    name = f"{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_{digest}"  # no installed module has such a name
    if name in sys.modules:
        return sys.modules[name]
    add_to_path(file.parent)
    module = import_user_code(where, str(file), lambda: _execute(name, file), "")
    for sibling in _list_imports(file):
        if sibling in sys.modules:
            refuse_another(f"{where}: {file}", sys.modules[sibling], file.parent)
    return module


def _execute(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _files[name] = str(file)
    return module


def _list_imports(file: Path) -> Iterator[str]:
    """Yield the top-level names that a file imports."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def add_to_path(directory: str | os.PathLike[str]) -> None:
    """Add a directory at the end of `sys.path`, unless it is there."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
        importlib.invalidate_caches()


_digests: dict[str, str] = {}


def record_function(name: str, function: Callable[..., Any]) -> None:
    """Record a digest of a function's code under the function's name in the configuration."""
    _digests[name] = hashlib.sha256(_read_code(function).encode()).hexdigest()[:32]


def function_digest(name: str) -> str | None:
    """Return the recorded digest of a function's code, or None if no function of this name is recorded."""
    return _digests.get(name)


def _read_code(function: Any) -> str:
    """Return the source of a function, or of a callable object's class; the bytecode if there is no source."""
    if isinstance(function, functools.partial):
        return f"{_read_code(function.func)} {function.args} {function.keywords}"
    is_code = inspect.isroutine(function) or inspect.isclass(function)
    try:
        return inspect.getsource(function if is_code else type(function))
    except (OSError, TypeError):  # it was typed into an interpreter, for example
        code = getattr(function, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {code.co_consts} {code.co_names}"
