"""Show a step's batch in a terminal with colours, or as plain text in which brackets mark what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from rl_megatron.observability.batch_view import BatchView, ShownGroup, ShownSequence, Token

_TRAINED = ("black on green", "black on bright_green")  # in turns, so that each token is seen
_SPECIAL = "bold magenta"
_BAR = 48  # columns of a pack
_LEGEND = (
    ("⟦trained⟧", _TRAINED[0], "counts in the loss"),
    ("«special»", _SPECIAL, "one special token, not text"),
    ("↵ ⇥ ·", "", "newline, tab, and a space that would not be seen"),
)


def print_batch(console: Console, view: BatchView, show_ids: bool = False) -> None:
    """Print a view: with colours in a terminal, and without line breaks of its own into a pipe.

    Args:
        console: Where to print.
        view: What to show.
        show_ids: Whether to list the token ids of each sequence.
    """
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
        _print(console, Text(pack_bar(group)))
    for sequence in group.sequences:
        _print(console, Text(_heading(sequence), style="bold"))
        if sequence.tokens:
            _print(console, _coloured(sequence.tokens) if console.is_terminal else Text(marked(sequence.tokens)))
        if sequence.note:
            _print(console, Text(sequence.note, style="italic"))
        if show_ids and sequence.tokens:
            _print(console, Text("ids " + " ".join(str(token.id) for token in sequence.tokens), style="dim"))


def _heading(sequence: ShownSequence) -> str:
    numbers = [f"{len(sequence.tokens)} tokens"] if sequence.tokens else []
    numbers += [f"{sequence.num_trained} trained"] if sequence.num_trained else []
    numbers += [f"{sequence.padding} padding"] if sequence.padding else []
    return f"{sequence.title}: {', '.join(numbers)}"


def pack_bar(group: ShownGroup) -> str:
    """Return a pack as a bar of sequences, `[0·····|3···|5··]`, each as long as its share of the pack."""
    total = sum(tokens + padding for _, tokens, padding in group.pack)
    parts = []
    for title, tokens, padding in group.pack:
        number = title.removeprefix("sequence ").partition(",")[0] if tokens else ""
        parts.append(number.ljust(max(1, round(_BAR * (tokens + padding) / total)), "·"))
    return f"[{'|'.join(parts)}]"


def marked(tokens: Sequence[Token]) -> str:
    """Return the text of tokens with `⟦…⟧` around what is trained and `«…»` around special tokens."""
    parts = []
    for trained, span in groupby(zip(tokens, visible_texts(tokens), strict=True), key=lambda pair: pair[0].trained):
        text = "".join(f"«{text}»" if token.special else text for token, text in span)
        parts.append(f"⟦{text}⟧" if trained else text)
    return "".join(parts)


def _coloured(tokens: Sequence[Token]) -> Text:
    line = Text()
    for number, (token, text) in enumerate(zip(tokens, visible_texts(tokens), strict=True)):
        style = _TRAINED[number % 2] if token.trained else ""
        if token.special:
            line.append(f"«{text}»", style=f"{style} bold" if token.trained else _SPECIAL)
        else:
            line.append(text, style=style)
    return line


def visible_texts(tokens: Sequence[Token]) -> list[str]:
    """Return the text of each token, in which no whitespace is invisible.

    A space is also shown as `·` if it begins or ends a run of trained or of untrained tokens.
    """
    shown = []
    for number, token in enumerate(tokens):
        before, after = (tokens[at] if 0 <= at < len(tokens) else None for at in (number - 1, number + 1))
        previous = before.text[-1:] if before is not None and before.trained == token.trained else "\n"
        following = after.text[:1] if after is not None and after.trained == token.trained else "\n"
        shown.append(visible_text(token.text, previous, following))
    return shown


def visible_text(text: str, before: str = "\n", after: str = "\n") -> str:
    """Return a token's text with a mark for whitespace that would not be seen.

    A newline is shown as `↵` and a line break, a tab as `⇥`, and a space as `·` if it begins or ends a line. Other
    control characters are escaped.

    Args:
        text: The text.
        before: The character before it; a newline, if it begins a line.
        after: The character behind it; a newline, if it ends a line.
    """
    shown = []
    for number, character in enumerate(text):
        previous = text[number - 1] if number else before
        following = text[number + 1 :].lstrip(" ")[:1] or after
        if character == "\n":
            shown.append("↵\n")
        elif character == "\t":
            shown.append("⇥")
        elif character == " " and ("\n" in (previous, following) or (shown and shown[-1] == "·")):
            shown.append("·")
        else:
            shown.append(character if character == " " or character.isprintable() else ascii(character)[1:-1])
    return "".join(shown)


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=not console.is_terminal, overflow="fold" if console.is_terminal else None)
