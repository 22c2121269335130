"""The documentation site builds without a warning, and its pages load nothing from the internet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from docs import hooks
from tests.forkserver import REPOSITORY

DOCS = REPOSITORY / "docs"
SEARCH_INDEX = "search/search_index.json"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a warning, such as of a link that leads nowhere, fails the build."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stdout + built.stderr
    return directory


@pytest.mark.change
def test_every_page_is_built_and_loads_nothing_from_other_sites(site):
    built = {path.relative_to(site).with_suffix(".md").as_posix(): path.read_text() for path in site.rglob("*.html")}
    written = {
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    } | hooks.PAGES_FROM_THE_REPOSITORY.keys()
    assert written <= built.keys()
    for name, page in built.items():
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?://[^"]*)"', page)
        assert not loaded, f"{name} loads {loaded}"
    assert "<math" in built["losses.md"] and "```" not in built["losses.md"]
    assert not list(site.rglob("*.py")), "the generators are not part of the site"


@pytest.mark.change
def test_every_page_is_two_clicks_from_the_landing_page_and_found_by_search(site):
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    reached = {"index.html"}
    for _ in range(2):
        for name in tuple(reached):
            targets = re.findall(r'<a [^>]*href="([^"#:?]+\.html)(?:#[^"]*)?"', (site / name).read_text())
            reached |= {os.path.normpath(os.path.join(os.path.dirname(name), target)) for target in targets}
    assert pages <= reached, pages - reached
    found = {entry["location"].partition("#")[0] for entry in json.loads((site / SEARCH_INDEX).read_text())["docs"]}
    assert pages <= found, pages - found


@pytest.mark.change
def test_the_python_api_has_signatures_and_docstrings(site):
    page = re.sub(r"<[^>]*>", "", (site / "reference" / "api.html").read_text())
    for shown in ("from_checkpoint", "vocab_size", "register_loss", "Raises:"):
        assert shown in page


@pytest.mark.parametrize(
    ("markdown", "address", "expected"),
    [
        ("[schema.py](../rl_megatron/config/schema.py)", "losses.md", "`rl_megatron/config/schema.py`"),
        ("[`schema.py`](../rl_megatron/config/schema.py)", "losses.md", "`rl_megatron/config/schema.py`"),
        ("[the schema](../../rl_megatron/config/schema.py)", "a/b.md", "the schema (`rl_megatron/config/schema.py`)"),
        ("[changes](../CHANGELOG.md)", "losses.md", "[changes](changelog.md)"),
        ("[losses](docs/losses.md#dpo)", "changelog.md", "[losses](losses.md#dpo)"),
        ("[losses](../losses.md)", "reference/metrics.md", "[losses](../losses.md)"),
        ("[paper](https://arxiv.org/abs/1707.06347)", "losses.md", "[paper](https://arxiv.org/abs/1707.06347)"),
        ("[above](#dpo)", "losses.md", "[above](#dpo)"),
    ],
)
def test_links_lead_to_pages_or_name_a_file_of_the_repository(markdown, address, expected):
    place = REPOSITORY if address == "changelog.md" else (DOCS / address).parent
    assert hooks.rewrite_links(markdown, address, place, None) == expected


def test_links_lead_to_the_repository_if_it_has_an_address():
    link = hooks.rewrite_links("[it](../setup.py#L1)", "losses.md", DOCS, "https://example.org/blob/main/")
    assert link == "[it](https://example.org/blob/main/setup.py#L1)"


def test_a_link_to_a_missing_file_is_a_warning(caplog):
    hooks.rewrite_links("[gone](../gone.py)", "losses.md", DOCS, None)
    assert "losses.md links to ../gone.py, which does not exist" in caplog.text


def test_code_blocks_stay_as_they_are():
    text = "[a](../setup.py)\n\n```bash\n[a](../setup.py)\n```\n\n[a](../setup.py)\n"
    changed = hooks.outside_fences(text, lambda part: part.replace("[a](../setup.py)", "X"))
    assert changed == "X\n\n```bash\n[a](../setup.py)\n```\n\nX\n"


def test_formulas_become_mathml():
    fraction = hooks.mathml(r"\frac{1}{N} \sum_t \hat A_t", "block")
    assert "<mfrac>" in fraction and "&#x02211;" in fraction and 'accent="true"' in fraction
    assert "ℒ" in hooks.mathml(r"\mathcal L", "inline")
    with pytest.raises(ValueError, match=r"commands that are not known: \['\\\\nonsense'\]"):
        hooks.mathml(r"\nonsense x", "inline")


def test_dollars_of_prose_and_code_are_not_formulas():
    from markdown import Markdown

    convert = Markdown(extensions=[hooks.InlineMath()]).convert
    assert "<math" in convert("a ratio $r_t = 1$, and")
    for text in ("it costs $5 and $6", "`$HOME` and `$PATH`", "$HOME/.cache and $TMPDIR"):
        assert "<math" not in convert(text), text
