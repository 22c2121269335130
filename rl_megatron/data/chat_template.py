"""Render conversations with a Hugging Face chat template, and find the assistant's turns in the text.

The turns are found by the template's `{% generation %}` markers if it has them. Otherwise, the messages before the turn
are rendered twice: with the generation prompt, and with the turn. The turn is the text that only the second rendering
has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding

from rl_megatron.config.schema import DataConfig
from rl_megatron.data.conversations import Conversation
from rl_megatron.data.tokenizer import Tokenizer

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


class ChatTemplate:
    """A chat template with its variables.

    It renders with transformers' code, so that the text equals that of `apply_chat_template`.

    Args:
        texts: Name → Jinja text. "tool_use" is used for conversations with tools if it exists, otherwise "default".
        variables: Further variables of the template: the tokenizer's named tokens, and `data.chat_template_kwargs`.
        name: The template's name in messages: its file, or "the tokenizer's chat template".
    """

    def __init__(self, texts: Mapping[str, str], variables: Mapping[str, Any], name: str):
        self._texts, self._variables, self._name = texts, dict(variables), name

    @property
    def text_with_tools(self) -> str:
        """Return the Jinja text for conversations with tools, or "" if there is none."""
        return self._texts.get("tool_use", self._texts.get("default", ""))

    def prompt(self, conversation: Conversation) -> str:
        """Return the text of the conversation, with the generation prompt for the assistant's next turn at the end."""
        return self._render(conversation, len(conversation.messages), generation_prompt=True)

    def text(self, conversation: Conversation) -> str:
        """Return the text of the whole conversation."""
        return self._render(conversation, len(conversation.messages))

    def render_with_turns(self, conversation: Conversation, last_only: bool) -> tuple[str, list[Span]]:
        """Return the text of the conversation, and where the turns to learn begin and end in it.

        Turns in the conversation's context are not returned. With `last_only`, only the last turn is.
        """
        turns = [
            number
            for number, message in enumerate(conversation.messages)
            if number >= conversation.num_context and message["role"] == "assistant"
        ]
        if not turns:
            raise ValueError(f"{conversation.record.location}: the conversation has no assistant message to learn.")
        turns = turns[-1:] if last_only else turns
        if _MARKER.search(self._choose_text(conversation)):
            return self._find_marked_turns(conversation, turns[0])
        text = self.text(conversation)
        return text, [self._compare_turn(conversation, turn, text) for turn in turns]

    def _find_marked_turns(self, conversation: Conversation, first: int) -> tuple[str, list[Span]]:
        """Return the text, and its spans between generation markers from the message `first` on."""
        spans: list[Span] = []
        text = self._render(conversation, len(conversation.messages), spans=spans)
        earlier_spans: list[Span] = []
        if any(message["role"] == "assistant" for message in conversation.messages[:first]):
            self._render(conversation, first, spans=earlier_spans)
        spans = spans[len(earlier_spans) :]
        if not spans:
            raise ValueError(
                f"{conversation.record.location}: {self._name} marks no text of message {first + 1} (assistant) with "
                "{% generation %}: mark it in the template."
            )
        return text, spans

    def _compare_turn(self, conversation: Conversation, turn: int, text: str) -> Span:
        """Return where the message with index `turn` begins and ends in the text of the whole conversation."""
        prompt = self._render(conversation, turn, generation_prompt=True)
        answered = text if turn == len(conversation.messages) - 1 else self._render(conversation, turn + 1)
        if text.startswith(answered) and answered.startswith(prompt):
            return len(prompt), len(answered)
        reason = (
            "the prompt for it is not a prefix of the rendered conversation"
            if not text.startswith(prompt)
            else "its text changes if messages follow it"
        )
        raise ValueError(
            f"{conversation.record.location}: message {turn + 1} (assistant) cannot be learned with {self._name}, "
            f"because {reason}: set data.trained_turns=last if this is not the last turn, or data.chat_template to a "
            "template with {% generation %} markers around the assistant's turns."
        )

    def _choose_text(self, conversation: Conversation) -> str:
        if conversation.tools is not None and "tool_use" in self._texts:
            return self._texts["tool_use"]
        if "default" not in self._texts:
            raise ValueError(
                f"{self._name} has no default template, only {sorted(self._texts)}: set data.chat_template to a file."
            )
        return self._texts["default"]

    def _render(
        self,
        conversation: Conversation,
        num_messages: int,
        generation_prompt: bool = False,
        spans: list[Span] | None = None,
    ) -> str:
        """Return the text of the first messages; if `spans` is a list, append the spans between generation markers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if num_messages == 0 and not generation_prompt:
            return ""
        tools: list[Any] | None = conversation.tools
        try:
            (text,), marked = render_jinja_template(
                [conversation.messages[:num_messages]],
                tools=tools,
                chat_template=self._choose_text(conversation),
                return_assistant_tokens_mask=spans is not None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is code of the user or the model's authors, and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{conversation.record.location}: {self._name} fails{_locate_line(error)}: {reason.rstrip('.')}"
                f"{_describe_roles(conversation.messages[:num_messages])}."
            ) from error
        if spans is not None:
            spans.extend(marked[0])  # pyright: ignore[reportArgumentType]  # the return type in transformers is wrong
        return text


def _locate_line(error: Exception) -> str:
    """Return " at line N", the line of the template that caused the error, or "" if it is unknown."""
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" at line {line}"


def _describe_roles(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a remark that lists the roles: most templates that refuse a conversation do so because of them."""
    return f" (the roles of its messages: {', '.join(message['role'] for message in messages) or 'none'})"


def load_template(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a data section: its own, or the tokenizer's."""
    variables: Mapping[str, object] = tokenizer.named_tokens | data.chat_template_kwargs
    if data.chat_template is None:
        if not tokenizer.chat_templates:
            raise ValueError(
                "data.format=chat needs a chat template, and the tokenizer has none: set data.chat_template to a Jinja "
                "file, or tokenizer.path to the tokenizer of a chat model."
            )
        return ChatTemplate(tokenizer.chat_templates, variables, "the tokenizer's chat template")
    is_text = _is_template(data.chat_template)
    name = "data.chat_template" if is_text else f"data.chat_template={data.chat_template}"
    return ChatTemplate({"default": read_template(data.chat_template)}, variables, name)


def read_template(configured: str) -> str:
    """Return the value of `data.chat_template` if it is Jinja text, otherwise the text of the file that it names."""
    if _is_template(configured):
        return configured
    file = Path(configured).expanduser()
    if not file.is_file():
        raise ValueError(f"data.chat_template: there is no file {file.absolute()}: set it to a Jinja file.")
    return file.read_text("utf-8")


def _is_template(configured: str) -> bool:
    """Return whether a value of `data.chat_template` is a template, and not the name of a file."""
    return "{{" in configured or "{%" in configured


def find_tokens(encoding: Encoding, begin: int, end: int) -> range:
    """Return the range of the tokens of characters `begin` to `end - 1`, empty if the tokenizer drops all of them."""
    if begin == end:
        return range(0)
    edges = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
    if None in edges:  # the tokenizer drops a character at an edge
        edges = [token for i in range(begin, end) if (token := encoding.char_to_token(i)) is not None]
    tokens = [token for token in edges if token is not None]
    if not tokens:
        return range(0)
    last = tokens[-1]
    while last + 1 < len(encoding.ids) and encoding.token_to_chars(last + 1) == encoding.token_to_chars(last):
        last += 1  # the last character has several tokens
    return range(tokens[0], last + 1)


def find_last_token(encoding: Encoding, text: str) -> int:
    """Return the index of the token of the last character that is not white space."""
    token = encoding.char_to_token(len(text.rstrip()) - 1)
    return len(encoding.ids) - 1 if token is None else token
