"""The sequences of a step with their tokens and loss mask, in a terminal or as an HTML page, for `show-batch`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from rich.console import Console
from rich.text import Text

_TRAINED = ("black on green", "black on bright_green")  # they alternate, so that token boundaries are visible
_SPECIAL = "bold magenta"
_BAR_WIDTH = 48  # characters of a pack's bar
_LEGEND = (
    ("⟦trained⟧", _TRAINED[0], "counts in the loss"),
    ("«special»", _SPECIAL, "one special token, not text"),
    ("↵ ⇥ ·", "", "newline, tab, and a space that would not be seen"),
)
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
_HTML_MASK = '<span class="trained">Trained</span> tokens count in the loss; other tokens are only read. '
_HTML_LEGEND = (
    '<span class="special">Special</span> tokens are one token each, not text. ↵ is a newline, ⇥ a tab, and · a space '
    "that would not be seen. Point at a token to see its id and position."
)


@dataclass(frozen=True)
class Token:
    """A token as it is shown.

    Attributes:
        id: Its number in the vocabulary.
        text: Its text if it follows another token.
        trained: Whether it counts in the loss.
        special: Whether it is a special token, such as end-of-sequence, rather than text.
    """

    id: int
    text: str
    trained: bool = False
    special: bool = False


@dataclass(frozen=True)
class ShownSequence:
    """A sequence of the batch, or a prompt.

    Attributes:
        title: Its number and, in a pair, whether it is the chosen or the rejected one.
        tokens: Its tokens, without padding.
        padding: The number of padding positions after it in its microbatch.
        note: Further information, such as the reference answer; may be empty.
    """

    title: str
    tokens: list[Token]
    padding: int = 0
    note: str = ""

    @property
    def num_trained(self) -> int:
        """Return the number of tokens that count in the loss."""
        return sum(token.trained for token in self.tokens)

    @property
    def counts(self) -> str:
        """Return the numbers of tokens, trained tokens and padding positions in words, without those that are 0."""
        numbers = {"tokens": len(self.tokens), "trained": self.num_trained, "padding": self.padding}
        return ", ".join(f"{number} {name}" for name, number in numbers.items() if number)


@dataclass(frozen=True)
class ShownGroup:
    """The sequences of a microbatch, or the prompts of a step.

    Attributes:
        sequences: The sequences, in the order in which the model gets them.
        pack: The (title, number of tokens, number of padding positions) of each sequence if they share one pack, or of
            each segment if they share tokens; otherwise empty.
        num_hidden: The number of sequences that the user did not ask to see.
    """

    title: str
    sequences: list[ShownSequence]
    pack: tuple[tuple[str, int, int], ...] = ()
    num_hidden: int = 0


@dataclass(frozen=True)
class BatchView:
    """Everything that is shown of a step, or of the held-out data.

    Attributes:
        title: The stage and the step.
        facts: The names and values that are shown above the sequences.
        has_mask: Whether the sequences have a loss mask; prompts do not.
    """

    title: str
    facts: list[tuple[str, str]]
    groups: list[ShownGroup]
    has_mask: bool = True

    @property
    def num_hidden(self) -> int:
        """Return the number of sequences that are not shown."""
        return sum(group.num_hidden for group in self.groups)

    def shorten(self, limit: int) -> BatchView:
        """Return the view with the first `limit` sequences only."""
        groups, left = [], limit
        for group in self.groups:
            sequences = group.sequences[: max(left, 0)]
            left -= len(sequences)
            groups.append(replace(group, sequences=sequences, num_hidden=len(group.sequences) - len(sequences)))
        return replace(self, groups=groups)


# --- in a terminal ---


def print_batch(console: Console, view: BatchView, show_ids: bool = False) -> None:
    """Print a view, with colours in a terminal; elsewhere, brackets mark trained tokens, and lines are not wrapped."""
    _print(console, Text(view.title, style="bold"))
    width = max(len(name) for name, _ in view.facts) + 2
    for name, value in view.facts:
        console.print(Text.assemble((name.ljust(width), "bold"), value), soft_wrap=not console.is_terminal)
    for sample, style, meaning in _LEGEND if view.has_mask else _LEGEND[1:]:
        _print(console, Text.assemble((sample, style if console.is_terminal else ""), f"  {meaning}"))
    for group in view.groups:
        if group.sequences or group.pack:
            _print_group(console, group, show_ids)
    if view.num_hidden:
        shown = sum(len(group.sequences) for group in view.groups)
        _print(console, Text(f"\n{view.num_hidden} more: --sequences {shown + view.num_hidden} shows all"))


def _print_group(console: Console, group: ShownGroup, show_ids: bool) -> None:
    console.print()
    if console.is_terminal:
        console.rule(Text(group.title), align="left", style="dim")
    else:
        _print(console, Text(f"== {group.title}"))
    if group.pack:
        _print(console, Text(draw_pack(group)))
    for sequence in group.sequences:
        _print(console, Text(f"{sequence.title}: {sequence.counts}", style="bold"))
        if sequence.tokens:
            _print(console, _colour(sequence.tokens) if console.is_terminal else Text(mark_tokens(sequence.tokens)))
        if sequence.note:
            _print(console, Text(sequence.note, style="italic"))
        if show_ids and sequence.tokens:
            _print(console, Text("ids " + " ".join(str(token.id) for token in sequence.tokens), style="dim"))


def draw_pack(group: ShownGroup) -> str:
    """Return a pack as a bar of sequences, `[0·····|3···|5··]`, each as long as its share of the pack."""
    total = sum(tokens + padding for _, tokens, padding in group.pack)
    parts = []
    for title, tokens, padding in group.pack:
        number = title.removeprefix("sequence ").partition(",")[0] if tokens else ""
        parts.append(number.ljust(max(1, round(_BAR_WIDTH * (tokens + padding) / total)), "·"))
    return f"[{'|'.join(parts)}]"


def mark_tokens(tokens: Sequence[Token]) -> str:
    """Return the text of tokens with `⟦…⟧` around trained tokens and `«…»` around special tokens."""
    parts = []
    for trained, span in groupby(zip(tokens, _show_texts(tokens), strict=True), key=lambda pair: pair[0].trained):
        text = "".join(f"«{text}»" if token.special else text for token, text in span)
        parts.append(f"⟦{text}⟧" if trained else text)
    return "".join(parts)


def _colour(tokens: Sequence[Token]) -> Text:
    line = Text()
    for number, (token, text) in enumerate(zip(tokens, _show_texts(tokens), strict=True)):
        style = _TRAINED[number % 2] if token.trained else ""
        if token.special:
            line.append(f"«{text}»", style=f"{style} bold" if token.trained else _SPECIAL)
        else:
            line.append(text, style=style)
    return line


def _show_texts(tokens: Sequence[Token]) -> list[str]:
    """Return the text of each token, with marks for whitespace that would not be seen.

    A space is also shown as `·` if it begins or ends a run of trained or of untrained tokens.
    """
    texts = []
    for index, token in enumerate(tokens):
        left, right = (tokens[at] if 0 <= at < len(tokens) else None for at in (index - 1, index + 1))
        previous = left.text[-1:] if left is not None and left.trained == token.trained else "\n"
        following = right.text[:1] if right is not None and right.trained == token.trained else "\n"
        texts.append(show_text(token.text, previous, following))
    return texts


def show_text(text: str, left: str = "\n", right: str = "\n") -> str:
    """Return a token's text with a mark for whitespace that would not be seen.

    A newline is shown as `↵` and a line break, a tab as `⇥`, and a space as `·` if it begins or ends a line. Other
    control characters are escaped. `left` and `right` are the characters before and after the text: a newline if the
    text begins or ends a line.
    """
    characters = []
    for index, character in enumerate(text):
        previous = text[index - 1] if index else left
        following = text[index + 1 :].lstrip(" ")[:1] or right
        if character == "\n":
            characters.append("↵\n")
        elif character == "\t":
            characters.append("⇥")
        elif character == " " and ("\n" in (previous, following) or (characters and characters[-1] == "·")):
            characters.append("·")
        else:
            characters.append(character if character == " " or character.isprintable() else ascii(character)[1:-1])
    return "".join(characters)


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=not console.is_terminal, overflow="fold" if console.is_terminal else None)


# --- as an HTML page ---


def render_batch_page(view: BatchView) -> str:
    """Return the HTML page of a view. It needs no other file, and follows the browser's light or dark mode."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in view.facts)
    groups = "\n".join(_render_group(group) for group in view.groups if group.sequences or group.pack)
    legend = (_HTML_MASK if view.has_mask else "") + _HTML_LEGEND
    hidden = f'<p class="note">{view.num_hidden} more are not on this page.</p>' if view.num_hidden else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(view.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(view.title)}</h1>\n<dl>{facts}</dl>\n"
        f'<p class="note">{legend}</p>\n{groups}\n{hidden}\n</body>\n</html>\n'
    )


def _render_group(group: ShownGroup) -> str:
    bar = _render_pack(group) if group.pack else ""
    sequences = "\n".join(map(_render_sequence, group.sequences))
    return f"<section>\n<h2>{escape(group.title)}</h2>\n{bar}{sequences}\n</section>"


def _render_pack(group: ShownGroup) -> str:
    """Return a pack as a bar. The width of each sequence, and of the padding after it, is its number of tokens."""
    parts = []
    for title, tokens, padding in group.pack:
        if tokens:
            number, label = title.removeprefix("sequence ").partition(",")[0], f"{title}: {tokens} tokens"
            parts.append(f'<div style="flex:{tokens}" title="{escape(label)}">{escape(number)}</div>')
        if padding:
            parts.append(f'<div class="empty" style="flex:{padding}" title="{padding} padding"></div>')
    return f'<div class="pack">{"".join(parts)}</div>\n'


def _render_sequence(sequence: ShownSequence) -> str:
    texts = zip(sequence.tokens, _show_texts(sequence.tokens), strict=True)
    tokens = "".join(_render_token(token, position, text) for position, (token, text) in enumerate(texts))
    note = f'\n<p class="note">{escape(sequence.note)}</p>' if sequence.note else ""
    shown = f"<pre>{tokens}</pre>" if sequence.tokens else ""
    return f"<h3>{escape(sequence.title)} <small>{sequence.counts}</small></h3>\n{shown}{note}"


def _render_token(token: Token, position: int, text: str) -> str:
    text = re.sub("([↵⇥·])", r"<i>\1</i>", escape(text))
    classes = " ".join(name for name, applies in (("trained", token.trained), ("special", token.special)) if applies)
    attribute = f' class="{classes}"' if classes else ""
    return f'<span{attribute} data-id="{token.id}" title="id {token.id}, position {position}">{text}</span>'
