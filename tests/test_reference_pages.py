"""The keys and commands in the glossary, the guides for users of other projects and other pages exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rl_megatron.compat.nemo_rl import MODULES
from rl_megatron.config.checkpoint_metadata import FORMAT, MANIFEST
from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.schema import ALGORITHM_CONFIGS, SOURCE_CONFIGS, RunConfig, StageConfig
from rl_megatron.data.tasks.registry import TASKS
from rl_megatron.losses import LOSSES, build_loss
from rl_megatron.rewards import REWARDS, functions  # noqa: F401  # registers those of the package
from rl_megatron.rollouts import tools  # noqa: F401  # likewise
from rl_megatron.rollouts.tools.formats import PARSERS
from rl_megatron.rollouts.tools.registry import TOOLS
from rl_megatron.runs.rerun import MAY_CHANGE

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMING_FROM = sorted((DOCS / "coming_from").glob("*.md"))
PAGES = [*COMING_FROM, *(DOCS / name for name in ("sizing.md", "data.md", "troubleshooting.md", "glossary.md"))]
GLOSSARY = (DOCS / "glossary.md").read_text()


def key_paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the key paths of a dataclass and of the dataclasses in its fields."""
    hints = get_type_hints(section, include_extras=True)
    for field in fields(section):
        path = prefix + field.name
        yield path
        for member in dataclasses_of(hints[field.name]):
            yield from key_paths(member, f"{path}.")


def dataclasses_of(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for argument in get_args(hint):
        yield from dataclasses_of(argument)


def known_keys() -> set[str]:
    """Return every key that a configuration can have, including those of algorithms, sources, losses and tasks."""
    keys = {*key_paths(StageConfig), *key_paths(RunConfig), "loss.name", "data.task.name"}
    for name in ALGORITHM_CONFIGS:
        keys |= set(key_paths(ALGORITHM_CONFIGS[name], "algorithm."))
    for name in SOURCE_CONFIGS:
        keys |= set(key_paths(SOURCE_CONFIGS[name], "data."))
    for name in LOSSES:
        keys |= {f"loss.{field.name}" for field in fields(build_loss(name).cfg)}
    for name in TASKS:
        keys |= {f"data.task.{field.name}" for field in fields(TASKS[name])}
    return keys


KEYS = known_keys()
SECTIONS = {key.partition(".")[0] for key in KEYS}


def keys_in(text: str) -> list[str]:
    """Return the keys in a text's code spans: dotted names that begin with a section and are not files."""
    words = [word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()]
    names = [word.partition("=")[0] for word in words]
    dotted = [name for name in names if re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)+", name)]
    return [name for name in dotted if name.partition(".")[0] in SECTIONS and not name.endswith((".json", ".jsonl"))]


def settings_in(text: str) -> list[str]:
    """Return the keys of the code spans that are settings, such as `precision=bf16`."""
    return re.findall(r"`([a-z_0-9.]+)=[^`\s]*`", text)


def rows_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (their name, our name) of every row of the page's tables."""
    for line in page.read_text().splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield cells[0], cells[1]


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_every_key_in_our_column_exists(page):
    ours = [key for theirs, ours in rows_of(page) for key in keys_in(ours) + settings_in(ours)]
    assert len(ours) > 20
    assert sorted(set(ours) - KEYS) == []


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_no_cell_of_a_table_is_empty(page):
    for theirs, ours in rows_of(page):
        assert theirs and ours, (theirs, ours)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in COMING_FROM], ids=lambda page: page.stem)
def test_every_key_of_a_page_exists(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^- `.*?:\s", "", text, flags=re.MULTILINE) if page.stem == "troubleshooting" else text
    assert sorted(set(keys_in(text)) - KEYS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_of_the_repository_are_valid(page):
    """The build of the site checks links between pages."""
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        if not target.endswith(".md"):
            assert (page.parent / target).exists(), target


COMMANDS = [
    (page, line)
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.change
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: value.stem if isinstance(value, Path) else "")
def test_every_command_is_valid(page, command, tmp_path, monkeypatch):
    words = shlex.split(command)
    started = next((word for word in ("train", "certify") if word in words), None)
    if started is None:
        assert words[0] == "rl-megatron" and words[1] in ("convert", "migrate"), command
        return
    monkeypatch.chdir(tmp_path)
    for title, code in re.findall(r'^```python title="(.+?)"\n(.*?)^```', page.read_text(), re.MULTILINE | re.DOTALL):
        (tmp_path / title).write_text(code)
    for checkpoint in (word.removeprefix("init_from=") for word in words if word.startswith("init_from=")):
        Path(checkpoint).mkdir(parents=True)
        (Path(checkpoint) / MANIFEST).write_text(json.dumps({"format": FORMAT, "model": asdict(ModelConfig())}))
    assert load_config([word for word in words[words.index(started) + 1 :] if not word.startswith("--")]).stages


def test_the_page_on_nemo_rl_lists_the_modules_that_we_replace():
    page = (DOCS / "coming_from" / "nemo_rl.md").read_text()
    for module in MODULES:
        package, _, name = module.rpartition(".")
        assert f"`{module}`" in page or (f"`{package}`" in page and f"`{name}`" in page), module


ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.*?)(?=^- |^#|\Z)", GLOSSARY, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("term", "entry"), ENTRIES, ids=[term for term, _ in ENTRIES])
def test_an_entry_of_the_glossary_is_one_sentence_with_a_link(term, entry):
    entry = " ".join(entry.split())
    prose = re.sub(r"\(\[.*?\]\(.*?\)\)|`.*?`", "", entry)
    assert re.search(r"\(\[.+?\]\(.+?\)\)\.$", entry), "the entry does not end with a link in brackets"
    assert prose.count(". ") == 0 and entry[0].isupper()


TERMS = [term.strip() for terms, _ in ENTRIES for term in terms.split(",")]


def test_no_term_is_twice_in_the_glossary():
    assert len(TERMS) == len(set(TERMS)) > 60


def test_the_glossary_has_every_word_of_the_names():
    (naming,) = re.findall(r"^## Names\n(.*)", (DOCS / "extending.md").read_text(), re.MULTILINE | re.DOTALL)
    words = {" ".join(word.split()) for word in re.findall(r"(?<!\*)\*([^*]+)\*", naming)}
    avoided = {"row", "chunk"}
    assert len(words) > 30
    assert (
        sorted(word for word in words - avoided if not {word, word.removesuffix("s"), f"{word} data"} & set(TERMS))
        == []
    )


@pytest.mark.parametrize("key", [key for keys in MAY_CHANGE.values() for key in keys])
def test_the_page_on_checkpoints_has_every_key_that_may_change(key):
    page = (DOCS / "checkpoints.md").read_text()
    assert f"`{key}…`" in page if key.endswith(".") else f"`{key}`" in page or f"`{key.split('.')[-1]}`" in page


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("rewards.md", list(REWARDS)),
        ("rollout_engines.md", list(ENGINE_DECLARATIONS)),
        ("tools.md", list(TOOLS)),
        ("tools.md", list(PARSERS)),
    ],
    ids=["rewards", "engines", "tools", "formats"],
)
def test_a_page_has_a_row_for_everything_that_is_registered(page, names):
    text = (DOCS / page).read_text()
    assert names
    assert not [name for name in names if f"\n| `{name}` " not in text]
