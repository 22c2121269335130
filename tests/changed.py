"""Print the files of tests that a change can reach: `python -m tests.changed [REVISION]`.

The change is everything that differs from REVISION: commits, edits, and files that git does not know yet. A file of
tests reaches a module that it imports, directly or through others, and one whose name it has as a string, as for a
command that runs in another process. A name that a package re-exports leads to the module that defines it, not to all
modules of the package; a test that has a registered name as a string reaches the module that registers it. A file that
is not Python reaches the tests that name it, or the directory at its top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("rl_megatron", "tests", "benchmarks", "docs", "examples")
ALWAYS = ("tests/test_architecture.py", "tests/test_language.py")
PRELOADED = "tests.preloaded"  # it spares ranks their imports; what they run is imported by the tests themselves
EVERYTHING = ("tests/conftest.py", "pyproject.toml", "setup.py", "constraints.txt", "hashes.txt")


class Imports:
    """What every module of a tree imports."""

    def __init__(self, root: Path):
        """Read the tree.

        Args:
            root: The repository. A stub beside a module is read instead of it, because it says what loads lazily.
        """
        self.paths: dict[str, Path] = {}
        for path in sorted(path for top in ROOTS for path in (root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._trees = {name: ast.parse(_source_of(path)) for name, path in self.paths.items()}

    @cache  # noqa: B019  # one object in a process
    def reached_from(self, module: str) -> frozenset[str]:
        """Return the modules that a module reaches, with the packages that they lie in, and the module itself."""
        found, open_modules = set(), [module]
        while open_modules:
            if (name := open_modules.pop()) not in found:
                found.add(name)
                open_modules.extend(self.imported_by(name))
        packages = {package for name in found for package in _packages_of(name)}
        return frozenset(found | packages & self.paths.keys())

    @cache  # noqa: B019
    def imported_by(self, module: str) -> frozenset[str]:
        """Return the modules that a module imports or names, with those of the fixtures that its tests use."""
        found = set(self._imports_in(module, self._trees[module]))
        for node in ast.walk(self._trees[module]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = node.value.partition(":")[0]
                if "." in named and named != PRELOADED:
                    found |= {named} & self.paths.keys()
                if module.startswith("tests."):
                    found |= self._registered().get(node.value.rpartition("=")[2], set())
            if isinstance(node, ast.FunctionDef) and module.startswith("tests."):
                for argument in node.args.args:
                    found |= self._fixtures(module).get(argument.arg, frozenset())
        return frozenset(found - {module})

    @cache  # noqa: B019
    def _registered(self) -> Mapping[str, set[str]]:
        """Return name → the modules that register it: `@register_loss("kto")`."""
        found: dict[str, set[str]] = {}
        for module, tree in self._trees.items():
            for node in ast.walk(tree) if module.startswith("rl_megatron.") else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    first = node.args[0]
                    if node.func.id.startswith("register_") and isinstance(first, ast.Constant):
                        found.setdefault(str(first.value), set()).add(module)
        return found

    def strings_in(self, module: str) -> Iterator[str]:
        for node in ast.walk(self._trees[module]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    def _imports_in(self, module: str, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.paths)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node, module, self.paths[module].name == "__init__.py")
                for alias in node.names:
                    if (name := self._defining(base, alias.name)) is not None:
                        yield name

    def _defining(self, base: str, name: str) -> str | None:
        """Return the module that `from base import name` reads the name from."""
        if f"{base}.{name}" in self.paths:
            return f"{base}.{name}"
        if base not in self.paths:
            return None
        return self._re_exported(base).get(name, base)

    @cache  # noqa: B019
    def _re_exported(self, package: str) -> Mapping[str, str]:
        found: dict[str, str] = {}
        if self.paths[package].name != "__init__.py":
            return found
        for node in ast.walk(self._trees[package]):
            if isinstance(node, ast.ImportFrom) and (base := _absolute(node, package, True)) != package:
                for alias in node.names:
                    if (name := self._defining(base, alias.name)) is not None:
                        found[alias.asname or alias.name] = name
        return found

    @cache  # noqa: B019
    def _fixtures(self, module: str) -> Mapping[str, frozenset[str]]:
        """Return the modules that the fixtures of a file of tests use: its own file's are imported by it anyway."""
        found: dict[str, frozenset[str]] = {}
        for package in _packages_of(module):
            conftest = f"{package}.conftest"
            if conftest in self.paths:
                imported = {
                    alias.asname or alias.name: self._defining(_absolute(node, conftest, False), alias.name)
                    for node in ast.walk(self._trees[conftest])
                    if isinstance(node, ast.ImportFrom)
                    for alias in node.names
                }
                for function in self._trees[conftest].body:
                    if isinstance(function, ast.FunctionDef):
                        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                        found[function.name] = frozenset(
                            name for key in names if (name := imported.get(key)) is not None
                        )
        return found


def _source_of(path: Path) -> str:
    stub = path.with_suffix(".pyi")
    return (stub if stub.exists() else path).read_text()


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *(node.module or "").split(".")]).rstrip(".")


def _packages_of(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def reached_tests(root: Path, changed: list[str]) -> list[str]:
    """Return the files of tests, relative to the root, that a change can reach; `["tests"]` if it can reach all.

    Args:
        root: The repository.
        changed: The changed files, relative to it.
    """
    if any(name in EVERYTHING for name in changed):
        return ["tests"]
    imports = Imports(root)
    names = {path.relative_to(root).as_posix(): name for name, path in imports.paths.items()}
    modules = {names[file] for file in changed if file in names}
    others = [file for file in changed if file not in names]
    mentions = {text for file in others for text in (file, Path(file).name, file.partition("/")[0])}
    found = {file for file in ALWAYS if (root / file).exists()} if changed else set()
    for file, name in names.items():
        if Path(file).name.startswith("test_") and file.startswith("tests/"):
            reached = imports.reached_from(name)
            if modules & reached or any(
                mentions.intersection(imports.strings_in(module)) for module in reached if module.startswith("tests.")
            ):
                found.add(file)
    return sorted(found)


def changed_files(root: Path, revision: str) -> list[str]:
    """Return what differs from a revision, with new files; deleted ones are left out."""
    listed = (
        ["git", "diff", "--name-only", "--diff-filter=d", revision],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    outputs = [subprocess.run(command, cwd=root, check=True, capture_output=True, text=True) for command in listed]
    return sorted({line for output in outputs for line in output.stdout.splitlines()})


if __name__ == "__main__":
    print("\n".join(reached_tests(REPOSITORY, changed_files(REPOSITORY, sys.argv[1] if sys.argv[1:] else "HEAD"))))
