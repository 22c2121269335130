"""The generated references are what their generators write, and leave out no key, metric or public name."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

import rl_megatron
from docs import declarations, generate_configuration, generate_metrics
from rl_megatron.config import schema
from rl_megatron.config.loading.hints import schema_paths
from rl_megatron.config.metrics import EVAL_METRICS, METRICS, Metric
from rl_megatron.data.tasks.registry import TASKS
from tests.docs.forked import Fork
from tests.forkserver import REPOSITORY

SECTION_NAMES = {field.name for field in dataclasses.fields(schema.StageConfig)} - {"precision", "device"}


def rows(page):
    """Return the cells of every row of the page's tables, by the name in code in its first cell."""
    found = {}
    for line in page.splitlines():
        if row := re.match(r"\| (?:<a [^>]*></a>)?`([^`]+)` \| (.*) \|$", line):
            found[row[1]] = re.split(r"(?<!\\)\|", row[2])
    return found


@pytest.fixture
def fresh(tmp_path, forks):
    """Call functions in a process in which no test has registered anything."""
    with Fork(forks.context, tmp_path) as fork:
        yield fork.call


def test_the_page_on_the_configuration_is_up_to_date(fresh):
    written = fresh(generate_configuration.page)
    assert generate_configuration.PAGE.read_text() == written, "run `python docs/generate_configuration.py`"


def test_the_page_on_metrics_is_up_to_date(fresh):
    written = fresh(generate_metrics.page)
    assert generate_metrics.PAGE.read_text() == written, "run `python docs/generate_metrics.py`"


def test_every_key_that_may_change_is_marked_and_no_other():
    table = rows(generate_configuration.PAGE.read_text())
    marked = {path for path, cells in table.items() if cells[-1].rstrip().endswith("*May change.*")}
    for key in generate_configuration.MAY_CHANGE:
        keys = {path for path in table if (path.startswith(key) if key.endswith(".") else path == key)}
        assert keys and keys <= marked, key
        marked -= keys
    assert not marked


def configuration_keys():
    """Return every key path that a configuration can have."""
    paths = {*schema_paths(schema.RunConfig), *schema_paths(schema.StageConfig)} - SECTION_NAMES
    for section, registry in (("algorithm", schema.ALGORITHM_CONFIGS), ("data", schema.SOURCE_CONFIGS)):
        paths |= {f"{section}.{field.name}" for config in registry.values() for field in dataclasses.fields(config)}
    paths |= {f"data.task.{field.name}" for task in TASKS.values() for field in dataclasses.fields(task)}
    services = {f"logger.{field.name}" for field in dataclasses.fields(schema.LoggerConfig)}
    return paths - services - {"algorithm.name", "model.rope_scaling.kind"}  # in the headings


def test_every_key_of_the_configuration_has_a_row(fresh):
    found, keys = rows(generate_configuration.PAGE.read_text()), fresh(configuration_keys)
    missing = sorted(keys - found.keys())
    assert not missing, f"configuration.md has no row for {missing}"
    for key in keys:
        assert all(cell.strip() for cell in found[key]), key


def declared_metrics():
    return {**METRICS, **EVAL_METRICS}


def test_every_metric_has_a_row(fresh):
    found = rows(generate_metrics.PAGE.read_text())
    missing = sorted(fresh(declared_metrics).keys() - found.keys())
    assert not missing, f"metrics.md has no row for {missing}"


def test_a_metric_without_a_group_is_refused(monkeypatch):
    monkeypatch.setitem(METRICS, "novel", Metric("novel", "1", "A new one.", "sum"))
    with pytest.raises(ValueError, match=r"\['novel'\] are in no group"):
        generate_metrics.page()


@dataclass
class Section:
    """A section as the schema declares them."""

    first: int = 0  # behind the field
    # Above the field,
    # on two lines.
    second: float = 0.5
    # third and fourth together.
    third: bool = False
    fourth: str = "a\nb"
    # Of the fifth alone.
    fifth: int | None = None
    sixth: Literal["one", "two"] = "one"


def test_the_meaning_of_a_key_is_the_comment_at_its_declaration():
    assert declarations.comments(Section) == {
        "first": "behind the field",
        "second": "Above the field, on two lines.",
        "third": "third and fourth together.",
        "fourth": "third and fourth together.",
        "fifth": "Of the fifth alone.",
    }


def test_a_key_without_a_meaning_is_refused():
    with pytest.raises(ValueError, match=r"Section does not say what \['sixth'\] mean"):
        declarations.keys(Section)
    declared = {key.name: key for key in declarations.keys(Section, without=("sixth",))}
    assert (declared["fifth"].type, declared["fifth"].default) == ("integer, or null", "null")
    assert declared["fourth"].default == '"a\\nb"'


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Annotated[int, Field(ge=1)], "integer ≥ 1"),
        (Annotated[float, Field(ge=0.0, lt=1.0)], "number in [0, 1)"),
        (Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (tuple[str, ...], "list of strings"),
        (Annotated[float, Field(gt=0.0)] | None, "number > 0, or null"),
    ],
)
def test_types_in_words(hint, words):
    assert declarations.in_words(hint) == words


def test_every_public_name_is_on_the_page_of_the_python_api():
    page = (REPOSITORY / "docs" / "reference" / "api.md").read_text()
    shown = set(re.findall(r"^::: rl_megatron\.(\w+)$", page, re.MULTILINE))
    assert shown == set(rl_megatron.__all__) - {"__version__"}
