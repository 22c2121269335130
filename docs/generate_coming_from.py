"""Write the generated parts of docs/coming_from/nemo_rl.md, verl.md and trl.md:

    python docs/generate_coming_from.py

These are the file of docs/coming_from/files, the experiment that `rl-megatron migrate` makes of it, and the table of
keys from rl_megatron/config/migration. tests/unit/config/test_migration_pages.py compares the pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rl_megatron.config.migration.experiment import write_experiment  # noqa: E402
from rl_megatron.config.migration.keys import Key  # noqa: E402
from rl_megatron.config.migration.read import LIBRARIES, read_source  # noqa: E402

PAGES = REPOSITORY / "docs" / "coming_from"
FILES = {"nemo_rl": "nemo_rl_grpo.yaml", "verl": "verl_grpo.yaml", "trl": "trl_grpo.py"}


def experiment(name: str) -> str:
    """Return the experiment of a library's file, with the name of the file instead of its path."""
    return write_experiment(read_source(PAGES / "files" / FILES[name])).replace(f"{PAGES / 'files'}/", "")


def table(name: str) -> str:
    """Return the library's keys that set a key here, or that need a decision, as a Markdown table."""
    lines = [f"| {LIBRARIES[name].name} | here | note |", "|---|---|---|"]
    return "\n".join([*lines, *(_row(keys, row) for keys, row in _rows(name))])


def _rows(name: str) -> Iterator[tuple[list[str], Key]]:
    """Yield keys with their row. Keys that differ only in their section share one."""
    shared: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    library = LIBRARIES[name]
    rows = {}
    for key, row in library.keys.items():
        if key in library.sections or row.is_automatic:
            continue
        same = (key.rpartition(".")[2], row.here, row.note)
        shared.setdefault(same, []).append(key)
        rows.setdefault(same, row)
    yield from ((keys, rows[same]) for same, keys in shared.items())


def _row(keys: list[str], row: Key) -> str:
    here = ", ".join(f"`{key}`" for key in row.here) or "–"
    theirs = ", ".join(f"`{key}`" for key in keys)
    if len(keys) > 2:
        sections = (key.rpartition(".")[0] for key in keys[1:])
        theirs = f"`{keys[0]}`, likewise in " + ", ".join(f"`{section}`" for section in sections)
    return f"| {theirs} | {here} | {row.note} |"


def page(name: str) -> str:
    """Return the page with its generated parts replaced."""
    text = (PAGES / f"{name}.md").read_text()
    file = PAGES / "files" / FILES[name]
    language = "python" if file.suffix == ".py" else "yaml"
    source = f'```{language} title="{file.name}"\n{file.read_text()}```'
    translated = f"```yaml\n{experiment(name)}```"
    for part, content in (("file", source), ("experiment", translated), ("keys", table(name))):
        block = f"<!-- {part}: written by docs/generate_coming_from.py -->\n{content}\n<!-- end of {part} -->"
        text, count = re.subn(
            rf"<!-- {part}: .*?<!-- end of {part} -->", lambda _, block=block: block, text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{name}.md has {count} places for its {part}")
    return text


if __name__ == "__main__":
    for library in FILES:
        (PAGES / f"{library}.md").write_text(page(library))
        print(f"wrote {PAGES / library}.md")
