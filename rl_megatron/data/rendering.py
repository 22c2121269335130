"""`Renderer` turns records into tokens. Training, sampling and evaluation all use it, so that they see the same tokens.

There are two formats. `plain` fills the prompt and answer templates of the data section with a record's fields. `chat`
makes a conversation, either from the record's messages or from these filled templates, and renders it with a chat
template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from tokenizers import Encoding

from rl_megatron import log
from rl_megatron.config.data_sources import check_plain
from rl_megatron.config.schema import DataConfig
from rl_megatron.data.chat_template import ChatTemplate, find_last_token, find_tokens, load_template
from rl_megatron.data.conversations import (
    Conversation,
    is_conversation,
    read_conversation,
    read_preference,
    read_prompt,
)
from rl_megatron.data.encoding import EncodedPair, EncodedPrompt, EncodedSequence
from rl_megatron.data.plain_text import PlainText, write_texts
from rl_megatron.data.records import Record
from rl_megatron.data.tasks.task import Problem, TaskRecord
from rl_megatron.data.tokenizer import Tokenizer

PLAIN, CHAT = "plain", "chat"


class Renderer:
    """The converter of a data section's records to tokens.

    All records of a renderer have one format. With `data.format=auto`, the first record decides the format, and all
    others must be of the same kind. With `format=chat`, conversations and records without messages can be mixed.

    Every method raises ValueError, with file:line, for a record that lacks a field or is malformed.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        self.data, self.tokenizer = data, tokenizer
        self.plain = PlainText(data.prompt_template, data.answer_template)
        self._template: ChatTemplate | None = None
        self._first: str | None = None  # the location of the first record
        self._first_has_messages = False
        self.format: str | None = None if data.format == "auto" else data.format
        if self.format == CHAT:
            self._template = load_template(data, tokenizer)

    def encode_prompt(self, record: Record) -> list[int]:
        """Return the tokens of the prompt that the policy completes, for rollouts and evaluation."""
        if self._resolve_format(record) == CHAT:
            conversation = self._read_prompt(record)
            return self._encode(self._get_template().prompt(conversation), conversation.record).ids
        return self._encode_plain_prompt(record)

    def render_prompt(self, record: Record) -> str:
        """Return the prompt as text, with the special tokens of a chat template spelled out."""
        if self._resolve_format(record) == CHAT:
            return self._get_template().prompt(self._read_prompt(record))
        return self.plain.write_prompt(record)

    def chat(self, record: Record) -> tuple[ChatTemplate, Conversation] | None:
        """Return the chat template and the conversation of the record's prompt, or None for plain text."""
        if self._resolve_format(record) != CHAT:
            return None
        return self._get_template(), self._read_prompt(record)

    def encode_problem(self, problem: Problem) -> EncodedPrompt:
        """Return the prompt of a problem."""
        record = problem.as_record()
        return self.build_prompt(problem, record, self.encode_prompt(record))

    def build_prompt(self, problem: Problem, record: Record, ids: list[int]) -> EncodedPrompt:
        """Return the prompt of a problem; `ids` are its tokens."""
        prefix = self.tokenizer.prefix_ids
        starts_with_prefix = ids[: len(prefix)] == prefix
        return EncodedPrompt(ids, problem, record, len(prefix) if starts_with_prefix else 0, self)

    def encode_example(self, record: Record) -> EncodedSequence:
        """Return the sequence of prompt and answer, or of a conversation, with the tokens to learn marked."""
        if self._resolve_format(record) == PLAIN:
            return self._encode_plain_example(record, record)
        if is_conversation(record):
            return self._encode_chat_example(self._add_system_prompt(read_conversation(record)))
        return self._encode_chat_example(self._build_conversation(record, record))

    def encode_pair(self, record: Record) -> EncodedPair:
        """Return the sequences of the chosen and of the rejected answer, which end where rollouts would end."""
        if self._resolve_format(record) == PLAIN:
            sides = [self._encode_plain_example(record, side) for side in self.plain.split_sides(record)]
        elif is_conversation(record):
            pair = read_preference(record)
            sides = [self._encode_chat_example(self._add_system_prompt(side), is_rollout=True) for side in pair]
        else:
            answered = (self._build_conversation(record, side) for side in self.plain.split_sides(record))
            sides = [self._encode_chat_example(side, is_rollout=True) for side in answered]
        chosen, rejected = sides
        if chosen.ids == rejected.ids:
            raise ValueError(f"{record.location}: 'chosen' and 'rejected' are the same tokens: remove the pair.")
        return EncodedPair(chosen, rejected)

    def check(self, record: Record, is_pair: bool) -> None:
        """Check that the record has what `encode_pair` (if `is_pair`) or `encode_example` reads: fields or messages."""
        if self._resolve_format(record) == CHAT and is_conversation(record):
            read_preference(record) if is_pair else read_conversation(record)
            return
        self.plain.prompt_parts(record)
        for answered in self.plain.split_sides(record) if is_pair else [record]:
            self.plain.answer_parts(answered)

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Return the token with which the chat template ends the assistant's turns, as a tuple; () if there is none."""
        if self.format != CHAT:
            return ()
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        conversation = Conversation(turns, Record({}, "a conversation of two messages"))
        try:
            text = self._get_template().text(conversation)
            encoding = self._encode(text, conversation.record)
        except ValueError as error:
            log.once(f"it is unknown which token ends the turns of the chat template: {error}")
            return ()
        last = encoding.ids[find_last_token(encoding, text)]
        return (last,) if self.tokenizer.is_added(last) else ()

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """Return the tokens that end a completion, besides those that the section `generation` adds."""
        return frozenset((self.tokenizer.eos_id, *self.end_of_turn_ids))

    # --- format ---

    def _resolve_format(self, record: Record) -> str:
        """Return the format. With `data.format=auto`, check that this record is of the first record's kind."""
        has_messages = is_conversation(record)
        if self._first is None:
            self._first, self._first_has_messages = record.location, has_messages
            self._choose_format(record, has_messages)
        elif self.data.format == "auto" and has_messages != self._first_has_messages:
            kinds = ("has no messages", "is a conversation")
            raise ValueError(
                f"{record.location}: the record {kinds[has_messages]}, and {self._first} "
                f"{kinds[self._first_has_messages]}: set data.format=chat, which renders both kinds with the chat "
                "template, or keep records of one kind in a data section."
            )
        assert self.format is not None
        return self.format

    def _choose_format(self, record: Record, has_messages: bool) -> None:
        data = self.data
        if self.format is None:
            self.format = CHAT if has_messages else PLAIN
            if has_messages:
                log.once("data.format: the records are conversations, which the chat template renders (format=chat)")
                self._template = load_template(data, self.tokenizer)
            else:
                check_plain(data, "data.format=auto and records without messages")
                if self.tokenizer.chat_templates:
                    file = record.location.rpartition(":")[0] or data.path or data.dataset_name or data.source
                    log.once(
                        f"{file}: the records are not conversations, so prompts are plain text without the tokenizer's "
                        "chat template, which a chat model needs; data.format=chat uses it, data.format=plain confirms "
                        "this"
                    )
        if self.format == CHAT and has_messages:
            for key in ("prompt_template", "answer_template"):
                if getattr(data, key) is not None:
                    raise ValueError(
                        f"data.{key}={getattr(data, key)!r} has no effect on records that are conversations, such as "
                        f"{record.location}: leave it out, or set data.format=plain to ignore the messages."
                    )

    # --- plain text ---

    def _encode_plain_prompt(self, record: Record) -> list[int]:
        """Return the tokens of the prompt, which start with the tokenizer's prefix (BOS) exactly once."""
        template, values = self.plain.prompt_parts(record)
        if isinstance(record, TaskRecord) and self.data.prompt_template is None:
            self._warn_of_markers(record.prompt)
        ids = self.tokenizer.encode_template(template, values)
        prefix = self.tokenizer.prefix_ids
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def _encode_plain_example(self, record: Record, answered: Record) -> EncodedSequence:
        """Encode prompt and answer separately, so that the prompt has the same tokens as for generation."""
        prompt = self._encode_plain_prompt(record)
        answer = [*self.tokenizer.encode_template(*self.plain.answer_parts(answered)), self.tokenizer.eos_id]
        trained = bytearray(len(prompt)) + b"\x01" * len(answer)
        trained[0] = 0
        return EncodedSequence(prompt + answer, bytes(trained), record)

    def _warn_of_markers(self, prompt: str) -> None:
        """Warn if a task's prompts contain special tokens, which stay plain text."""
        spelled = next((token for token in self.tokenizer.special_tokens if token in prompt), None)
        if spelled is not None:
            log.once(
                f"the task's prompts contain {spelled!r}, which stays plain text, because data cannot contain special "
                "tokens; write it in data.prompt_template, or set data.format=chat"
            )

    # --- conversations ---

    def _get_template(self) -> ChatTemplate:
        assert self._template is not None  # _resolve_format has chosen the format
        return self._template

    def _read_prompt(self, record: Record) -> Conversation:
        if is_conversation(record):
            return self._add_system_prompt(read_prompt(record))
        return self._add_system_prompt(Conversation([self._write_user_message(record)], record))

    def _build_conversation(self, record: Record, answered: Record) -> Conversation:
        """Return the conversation of the prompt and the answer, both written with the templates."""
        answer = {"role": "assistant", "content": self.plain.write_answer(answered)}
        return self._add_system_prompt(Conversation([self._write_user_message(record), answer], record, num_context=1))

    def _write_user_message(self, record: Record) -> dict[str, object]:
        return {"role": "user", "content": self.plain.write_prompt(record, of_message=True)}

    def _add_system_prompt(self, conversation: Conversation) -> Conversation:
        """Return the conversation with `data.system_prompt` first, unless it already begins with a system message."""
        text = self.data.system_prompt
        if text is None or conversation.messages[0]["role"] == "system":
            return conversation
        messages = [{"role": "system", "content": text}, *conversation.messages]
        num_context = conversation.num_context + 1 if conversation.num_context else 0
        return replace(conversation, messages=messages, num_context=num_context)

    def _encode_chat_example(self, conversation: Conversation, is_rollout: bool = False) -> EncodedSequence:
        """Encode the text of a conversation as a whole, and mark the tokens of the turns to learn.

        Args:
            conversation: The conversation.
            is_rollout: Whether the sequence ends where a rollout would: at the first token that ends a completion, in
                the last turn or after it.
        """
        record = conversation.record
        text, turns = self._get_template().render_with_turns(conversation, self.data.trained_turns == "last")
        encoding = self._encode(text, record)
        ids, trained = list(encoding.ids), bytearray(len(encoding.ids))
        for begin, end in turns:
            tokens = find_tokens(encoding, begin, end)
            if tokens and encoding.offsets[tokens[0]][0] < begin:
                log.once(
                    f"{record.location}: the first token of an assistant turn begins before the turn, so that "
                    "generation starts from other tokens than in training; this happens if the message begins with "
                    "white space"
                )
            trained[tokens.start : tokens.stop] = b"\x01" * len(tokens)
        if conversation.messages[-1]["role"] == "assistant":
            num_characters, last = len(text.rstrip()), find_last_token(encoding, text)
            is_added = self.tokenizer.is_added(ids[last])
            if not is_added:
                log.once("the chat template ends a conversation without a special token, so <eos> is appended to it")
                ids.append(self.tokenizer.eos_id)
                trained += b"\x01"
            elif turns[-1][1] < num_characters:
                log.once(
                    "the generation markers of the chat template leave out the token that ends a turn, so the model "
                    "does not learn to stop"
                )
            if is_rollout:
                begin, ends = turns[-1][0], {ids[last], *self._end_ids} if is_added else self._end_ids
                first = next((n for n, offsets in enumerate(encoding.offsets) if offsets[0] >= begin), last)
                end = next(number for number in range(first, len(ids)) if ids[number] in ends)
                if end < len(encoding.ids) and text[encoding.offsets[end][1] :].strip():
                    log.once(
                        f"{record.location}: text follows the token that ends the assistant's turn; it is left out of "
                        "the answers of pairs, because a rollout ends at that token"
                    )
                del ids[end + 1 :], trained[end + 1 :]
        trained[0] = 0
        if 1 not in trained:
            raise ValueError(f"{record.location}: the assistant's turns have no token to learn.")
        return EncodedSequence(ids, bytes(trained), record)

    def _encode(self, text: str, record: Record) -> Encoding:
        try:
            encoding = self.tokenizer.encode_special(text)
        except ValueError as error:
            raise ValueError(f"{record.location}: {error}") from error
        if not text.strip() or not encoding.ids:
            raise ValueError(
                f"{record.location}: the chat template renders no text (data.chat_template="
                f"{self.data.chat_template or 'null, the tokenizer has it'}); correct it, or name another file."
            )
        return encoding


def check_texts(records: Sequence[Record], data: DataConfig, tokenizer: Tokenizer | None, pairs: bool = False) -> None:
    """Check that the records or pairs of one file can be turned into tokens, and tokenize the first one.

    `tokenizer` is None if it has yet to be trained on the records.
    """
    if tokenizer is None:
        for _ in write_texts(records, data, pairs):
            pass
        return
    renderer = Renderer(data, tokenizer)
    for number, record in enumerate(records):
        renderer.check(record, pairs)
        if number == 0:
            renderer.encode_pair(record) if pairs else renderer.encode_example(record)
