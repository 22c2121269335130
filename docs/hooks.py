"""Prepare the pages for mkdocs: formulas, links to files of the repository, and the changelog.

mkdocs calls the functions `on_…` (see `hooks` in mkdocs.yml). The same pages can be read in the repository: there
`$…$`, ```math blocks and links such as `../rl_megatron/config/schema.py` work by themselves.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
# Files of the repository that are pages of the site, by the address of the page.
PAGES_FROM_THE_REPOSITORY = {"changelog.md": "CHANGELOG.md"} | {
    f"examples/{readme.parent.name}.md": readme.relative_to(REPOSITORY).as_posix()
    for readme in sorted(REPOSITORY.glob("examples/*/README.md"))
}
LOG = logging.getLogger("mkdocs.hooks")  # a warning here fails `mkdocs build --strict`

_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+")
_FENCE = re.compile(r"^(?P<indent>[ ]*)(?P<marks>`{3,}|~{3,}).*?^(?P=indent)(?P=marks)[ ]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")
_INLINE_FORMULA = r"(?<![\\$\w])\$(?![\s$])([^$\n]*(?:\n[^$\n]+)?[^$\s\\])\$(?![\w$])"
# What the converter writes, and what browsers need instead.
_CORRECTIONS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r'<mi mathvariant="script">([A-Z])</mi>', lambda letter: f"<mi>{_script_capital(letter[1])}</mi>"),
    (r"<mover>(.*?)<mo>&#x0005E;</mo></mover>", r'<mover accent="true">\1<mo>&#x0005E;</mo></mover>'),  # \widehat
    (r"(<mi>(?:log|exp)</mi>)(?!<mo)", r'\1<mspace width="0.167em" />'),
    (r"\\_", "_"),
)
_BEFORE_ESCAPES = 185  # the priority of Markdown's code spans is 190, and that of its escapes 180


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let ```math blocks and `$…$` become MathML."""
    fence = {"name": "math", "class": "math", "format": _math_block}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    config.markdown_extensions.append(InlineMath())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that are pages of the site."""
    for address, path in PAGES_FROM_THE_REPOSITORY.items():
        files.append(File.generated(config, address, content=(REPOSITORY / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links that lead somewhere on the site, or else to the repository."""
    address = page.file.src_uri
    place = (REPOSITORY / PAGES_FROM_THE_REPOSITORY.get(address, f"docs/{address}")).parent
    source_url = f"{config.repo_url.rstrip('/')}/blob/main/" if config.repo_url else None
    return outside_fences(markdown, lambda text: rewrite_links(text, address, place, source_url))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long names in tables break after a dot, an underscore and the like, so that no column is too wide."""

    def breakable(code: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([._=/])(?=\w)", r"\1<wbr>", code[0])

    return _CELL.sub(lambda cell: _CODE.sub(breakable, cell[0]), html)


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Return the text with `change` applied to everything outside fenced code blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def rewrite_links(text: str, address: str, place: Path, source_url: str | None) -> str:
    """Return Markdown whose links to files of the repository work on the site.

    A file under docs/ is linked as a page. For any other file the link leads to `source_url` plus its path; without a
    `source_url` the path is shown as code. A warning names a file that does not exist.

    Args:
        text: Markdown without fenced code blocks.
        address: The page's path on the site.
        place: The directory that relative links start from in the repository.
        source_url: The URL of the repository's files, or None.
    """

    def rewritten(link: re.Match[str]) -> str:
        path, mark, anchor = link["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        target = Path(os.path.normpath(place / path))
        if not target.is_relative_to(REPOSITORY):
            LOG.warning("%s links to %s, which is outside the repository", address, path)
            return link[0]
        inside = target.relative_to(REPOSITORY).as_posix()
        published = {file: page for page, file in PAGES_FROM_THE_REPOSITORY.items()}
        if inside in published or (target.is_relative_to(DOCS) and target.suffix != ".py"):
            page = published.get(inside) or target.relative_to(DOCS).as_posix()
            return f"[{link['text']}]({os.path.relpath(page, Path(address).parent)}{mark}{anchor})"
        if not target.exists():
            LOG.warning("%s links to %s, which does not exist", address, path)
        if source_url is not None:
            return f"[{link['text']}]({source_url}{inside}{mark}{anchor})"
        name = link["text"].strip("`")
        return f"`{inside}`" if name in inside else f"{link['text']} (`{inside}`)"

    return _LINK.sub(rewritten, text)


class InlineMath(Extension):
    """The Markdown extension that turns `$…$` into MathML."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(_InlineMath(_INLINE_FORMULA, md), "inline_math", _BEFORE_ESCAPES)


class _InlineMath(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        return self.md.htmlStash.store(mathml(m[1], "inline")), m.start(0), m.end(0)


def _math_block(source: str, *_: Any, **__: Any) -> str:
    return f'<div class="math">{mathml(source, "block")}</div>'


def mathml(formula: str, display: str) -> str:
    """Return a LaTeX formula as a MathML element; `display` is "inline" or "block".

    Raises:
        ValueError: the formula has a command that the converter does not know.
    """
    element = convert(formula.strip(), display=display)
    for pattern, replacement in _CORRECTIONS:
        element = re.sub(pattern, replacement, element)
    if unknown := re.findall(r">(\\[A-Za-z]+)<", element):
        raise ValueError(f"the formula {formula.strip()!r} has commands that are not known: {unknown}")
    return element


def _script_capital(letter: str) -> str:
    """Return the script form of a capital letter; browsers ignore mathvariant="script"."""
    older = {"B": "ℬ", "E": "ℰ", "F": "ℱ", "H": "ℋ", "I": "ℐ", "L": "ℒ", "M": "ℳ", "R": "ℛ"}  # named before the others
    return older.get(letter) or chr(ord("𝒜") + ord(letter) - ord("A"))
