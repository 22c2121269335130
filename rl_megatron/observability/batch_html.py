"""Show a step's batch as one self-contained HTML page, which follows the browser's light or dark mode."""

from __future__ import annotations

import re
from html import escape

from rl_megatron.observability.batch_text import visible_texts
from rl_megatron.observability.batch_view import BatchView, ShownGroup, ShownSequence, Token

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --quiet: #5d6873; --paper: #ffffff; --panel: #f4f6f8; --line: #d8dee4;
  --trained: #b9e6c4; --trained-ink: #08391a; --edge: #6fbf86; --special: #8a2fb0; --bar: #9db4cc; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde3e9; --quiet: #95a1ad; --paper: #14181d; --panel: #1c2228;
  --line: #343c45; --trained: #1d5a34; --trained-ink: #d7f7e0; --edge: #3b8f5b; --special: #d79bf0; --bar: #52677d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .8rem; }
h2 { font-size: 1rem; margin: 2rem 0 .4rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: .85rem; font-weight: 600; margin: 1rem 0 .25rem; }
h3 small, .note { color: var(--quiet); font-weight: 400; font-size: .85rem; }
.note { margin: .25rem 0 0; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 0 1rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 0; padding: .6rem .75rem; background: var(--panel); border: 1px solid var(--line); border-radius: 4px;
  font: 13px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre span { border-left: 1px solid var(--line); }
pre span:empty { padding-left: .3rem; }
pre span:hover { outline: 2px solid var(--special); }
.trained { background: var(--trained); color: var(--trained-ink); border-left-color: var(--edge); }
.special { color: var(--special); font-weight: 700; }
.trained.special { color: var(--trained-ink); text-decoration: underline; }
pre i { font-style: normal; opacity: .6; }
.pack { display: flex; height: 1.6rem; border: 1px solid var(--line); border-radius: 4px; overflow: hidden;
  font-size: .75rem; }
.pack div { background: var(--bar); border-left: 2px solid var(--paper); padding: .15rem .3rem; overflow: hidden;
  white-space: nowrap; min-width: 2px; }
.pack div:first-child { border-left: 0; } .pack .empty { background: none; color: var(--quiet); }
"""
_MASK = '<span class="trained">Trained</span> tokens count in the loss; other tokens are only read. '
_LEGEND = (
    '<span class="special">Special</span> tokens are one token each, not text. ↵ is a newline, ⇥ a tab, and · a space '
    "that would not be seen. Point at a token to see its id and position."
)


def batch_page(view: BatchView) -> str:
    """Return the HTML page of a view. It needs no other file."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in view.facts)
    groups = "\n".join(_group(group) for group in view.groups if group.sequences or group.pack)
    legend = (_MASK if view.has_mask else "") + _LEGEND
    hidden = f'<p class="note">{view.num_hidden} more are not on this page.</p>' if view.num_hidden else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(view.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(view.title)}</h1>\n<dl>{facts}</dl>\n"
        f'<p class="note">{legend}</p>\n{groups}\n{hidden}\n</body>\n</html>\n'
    )


def _group(group: ShownGroup) -> str:
    bar = _pack(group) if group.pack else ""
    sequences = "\n".join(map(_sequence, group.sequences))
    return f"<section>\n<h2>{escape(group.title)}</h2>\n{bar}{sequences}\n</section>"


def _pack(group: ShownGroup) -> str:
    """Return a pack as a bar: each sequence is as wide as its tokens, and so is the padding behind it."""
    parts = []
    for title, tokens, padding in group.pack:
        if tokens:
            number, label = title.removeprefix("sequence ").partition(",")[0], f"{title}: {tokens} tokens"
            parts.append(f'<div style="flex:{tokens}" title="{escape(label)}">{escape(number)}</div>')
        if padding:
            parts.append(f'<div class="empty" style="flex:{padding}" title="{padding} padding"></div>')
    return f'<div class="pack">{"".join(parts)}</div>\n'


def _sequence(sequence: ShownSequence) -> str:
    numbers = [f"{len(sequence.tokens)} tokens"] if sequence.tokens else []
    numbers += [f"{sequence.num_trained} trained"] if sequence.num_trained else []
    numbers += [f"{sequence.padding} padding"] if sequence.padding else []
    texts = zip(sequence.tokens, visible_texts(sequence.tokens), strict=True)
    tokens = "".join(_token(token, position, text) for position, (token, text) in enumerate(texts))
    note = f'\n<p class="note">{escape(sequence.note)}</p>' if sequence.note else ""
    shown = f"<pre>{tokens}</pre>" if sequence.tokens else ""
    return f"<h3>{escape(sequence.title)} <small>{', '.join(numbers)}</small></h3>\n{shown}{note}"


def _token(token: Token, position: int, text: str) -> str:
    text = re.sub("([↵⇥·])", r"<i>\1</i>", escape(text))
    classes = " ".join(name for name, holds in (("trained", token.trained), ("special", token.special)) if holds)
    attribute = f' class="{classes}"' if classes else ""
    return f'<span{attribute} data-id="{token.id}" title="id {token.id}, position {position}">{text}</span>'
