"""Conversations become the tokens of `apply_chat_template`, and the assistant's turns are learned."""

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template

from rl_megatron.config.data_sources import PreferenceConfig, PromptAnswerConfig, PromptsConfig
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tasks import Problem
from tests.unit.data.chat_families import (
    FAMILIES,
    LONG,
    ONE_TURN,
    TOOLS,
    TWO_TURNS,
    WITH_SYSTEM,
    WITH_TOOLS,
    assistant,
    call,
    system,
    user,
    write_tokenizer,
)

CONVERSATIONS = {
    "one turn": (ONE_TURN, None),
    "system": (WITH_SYSTEM, None),
    "two turns": (TWO_TURNS, None),
    "tools": (WITH_TOOLS, TOOLS),
    "long": (LONG, TOOLS),
}
KWARGS = {"plain": {}, "no thinking": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Family → (our tokenizer, transformers')."""
    found = {}
    for family in FAMILIES:
        directory = write_tokenizer(family, tmp_path_factory.mktemp(family))
        found[family] = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    return found


def record(messages, tools=None, **fields):
    return Record({"messages": messages, "tools": tools, **fields}, "chats.jsonl:3")


def renderer(tokenizer, config=PromptAnswerConfig, **keys):
    return Renderer(config(**keys), tokenizer)


def learned(tokenizer, example):
    """Return the texts of the runs of tokens that are learned."""
    runs, before = [], 0
    for token, trained in zip(example.ids, example.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


# What does not follow the prompt for it. Mistral's template writes the system message before the last user message if
# that ends the conversation. Qwen3's prompt without thinking has an empty block where this answer has its reasoning.
REFUSED = {
    ("mistral", "system", "plain"),
    ("mistral", "system", "no thinking"),
    ("qwen3", "long", "no thinking"),
}


@pytest.mark.parametrize("kwargs", sorted(KWARGS))
@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ids_are_those_of_transformers(families, family, name, kwargs):
    ours, theirs = families[family]
    (messages, tools), variables = CONVERSATIONS[name], KWARGS[kwargs]
    rendered = renderer(ours, PromptsConfig, chat_template_kwargs=variables)
    for end in [n + 1 for n, message in enumerate(messages) if message["role"] in ("user", "tool")]:
        expected = theirs.apply_chat_template(
            messages[:end], tools=tools, add_generation_prompt=True, return_dict=False, **variables
        )
        assert rendered.encode_prompt(record(messages[:end], tools)) == expected
        assert rendered.render_prompt(record(messages[:end], tools)) == theirs.apply_chat_template(
            messages[:end], tools=tools, add_generation_prompt=True, tokenize=False, **variables
        )
    last = renderer(ours, chat_template_kwargs=variables, trained_turns="last")
    if (family, name, kwargs) in REFUSED:
        with pytest.raises(ValueError, match="cannot be learned"):
            last.encode_example(record(messages, tools))
    else:
        example = last.encode_example(record(messages, tools))
        assert example.ids == theirs.apply_chat_template(messages, tools=tools, return_dict=False, **variables)


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_masks_with_generation_markers_are_those_of_trl(families, tmp_path, family, name):
    ours, theirs = families[family]
    messages, tools = CONVERSATIONS[name]
    template = get_training_chat_template(theirs)
    assert template is not None, "trl knows the family"
    (tmp_path / "training.jinja").write_text(template, "utf-8")
    example = renderer(ours, chat_template=str(tmp_path / "training.jinja")).encode_example(record(messages, tools))
    expected = theirs.apply_chat_template(
        messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert example.ids == expected["input_ids"]
    assert list(example.trained) == expected["assistant_masks"]
    last = renderer(ours, chat_template=str(tmp_path / "training.jinja"), trained_turns="last")
    assert learned(ours, last.encode_example(record(messages, tools))) == learned(ours, example)[-1:]


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "one turn"), ("qwen3", "system"), *(("llama3", name) for name in sorted(CONVERSATIONS))],
)
def test_masks_by_comparison_are_those_of_trl(families, family, name):
    ours, theirs = families[family]
    messages, tools = CONVERSATIONS[name]
    expected = theirs.apply_chat_template(
        messages, tools=tools, chat_template=get_training_chat_template(theirs), return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    example = renderer(ours).encode_example(record(messages, tools))
    assert (example.ids, list(example.trained)) == (expected["input_ids"], expected["assistant_masks"])


# What is learned, checked by hand: all turns, and the last turn.
TABLE = [
    ("qwen3", "system", ["<think>\n\n</think>\n\nThe sum is 5.<|im_end|>\n"]),
    ("mistral", "one turn", ["The sum is 5.</s>"]),
    ("mistral", "two turns", ["The sum is 5.</s>", "That is 8 <unk>.</s>"]),
    ("deepseek", "two turns", ["The sum is 5.<｜end▁of▁sentence｜>", "  That is 8 €.\n<｜end▁of▁sentence｜>"]),
    (
        "deepseek",
        "tools",
        [
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "It is sunny.<｜end▁of▁sentence｜>",
        ],
    ),
    ("llama3", "two turns", ["The sum is 5.<|eot_id|>", "That is 8 €.<|eot_id|>"]),
]


@pytest.mark.parametrize(("family", "name", "expected"), TABLE)
def test_the_turns_of_the_assistant_are_learned_with_what_ends_them(families, family, name, expected):
    tokenizer, _ = families[family]
    messages, tools = CONVERSATIONS[name]
    assert learned(tokenizer, renderer(tokenizer).encode_example(record(messages, tools))) == expected
    last = renderer(tokenizer, trained_turns="last").encode_example(record(messages, tools))
    assert learned(tokenizer, last) == expected[-1:]


@pytest.mark.parametrize(
    ("family", "name", "keys", "message"),
    [
        ("qwen3", "two turns", {}, "message 2 (assistant) cannot be learned"),
        ("qwen3", "tools", {}, "message 2 (assistant) cannot be learned"),
        ("mistral", "system", {}, "message 3 (assistant) cannot be learned"),
        ("qwen3", "two turns", {"chat_template_kwargs": {"enable_thinking": False}}, "message 2 (assistant) cannot"),
    ],
)
def test_a_turn_that_later_messages_change_is_refused(families, family, name, keys, message):
    tokenizer, _ = families[family]
    with pytest.raises(ValueError) as error:
        renderer(tokenizer, **keys).encode_example(record(*CONVERSATIONS[name]))
    said = str(error.value)
    assert said.startswith(f"chats.jsonl:3: {message}") and "data.trained_turns=last" in said, said


def test_the_last_turn_of_qwen3_can_be_learned_after_others(families):
    tokenizer, _ = families["qwen3"]
    example = renderer(tokenizer, trained_turns="last").encode_example(record(TWO_TURNS))
    assert learned(tokenizer, example) == ["<think>\n\n</think>\n\n  That is 8 €.\n<|im_end|>\n"]


def test_plain_records_and_tasks_become_conversations(families):
    tokenizer, theirs = families["qwen3"]
    chat = renderer(tokenizer, format="chat", system_prompt="Be brief.")
    question = Record({"question": "What is 2 + 3?", "answer": "The sum is 5."}, "sums.jsonl:1")
    assert chat.encode_example(question).ids == theirs.apply_chat_template(WITH_SYSTEM, return_dict=False)
    prompt = theirs.apply_chat_template(WITH_SYSTEM[:2], add_generation_prompt=True, return_dict=False)
    assert chat.encode_prompt(question) == chat.encode_example(question).ids[: len(prompt)] == prompt
    problem = Problem("What is 2 + 3?\n", "5", {"question": "What is 2 + 3?", "answer": "The sum is 5."})
    assert chat.encode_problem(problem).ids == prompt
    asked = renderer(tokenizer, format="chat", prompt_template="Q: {question}\n")
    assert asked.render_prompt(question) == "<|im_start|>user\nQ: What is 2 + 3?\n<|im_end|>\n<|im_start|>assistant\n"
    assert asked.encode_prompt(question) == asked.encode_problem(problem).ids


@pytest.mark.parametrize(
    "fields",
    [
        {"chosen": [*ONE_TURN], "rejected": [ONE_TURN[0], assistant("It is 6.")]},
        {"prompt": ONE_TURN[:1], "chosen": ONE_TURN[1:], "rejected": [assistant("It is 6.")]},
        {"prompt": ONE_TURN[:1], "chosen": "The sum is 5.", "rejected": "It is 6."},
        {"messages": ONE_TURN[:1], "chosen": "The sum is 5.", "rejected": "It is 6."},
        {"prompt": "What is 2 + 3?", "chosen": [*ONE_TURN], "rejected": [ONE_TURN[0], assistant("It is 6.")]},
    ],
)
def test_pairs_are_conversations_with_one_prompt(families, fields):
    tokenizer, theirs = families["llama3"]
    pair = renderer(tokenizer, PreferenceConfig).encode_pair(Record(fields, "pairs.jsonl:1"))
    assert pair.chosen.ids == theirs.apply_chat_template(ONE_TURN, return_dict=False)
    answers = [learned(tokenizer, side) for side in (pair.chosen, pair.rejected)]
    assert answers == [["The sum is 5.<|eot_id|>"], ["It is 6.<|eot_id|>"]]


@pytest.mark.parametrize(
    ("family", "marked"), [*((name, False) for name in FAMILIES), ("qwen3", True), ("llama3", True)]
)
def test_both_answers_of_a_pair_end_as_a_rollout_does(families, tmp_path, family, marked):
    """With the token at which generation stops, where a reward model's score is read, and nothing behind it."""
    tokenizer, theirs = families[family]
    keys = {}
    if marked:
        path = tmp_path / "chat.jinja"
        path.write_text(get_training_chat_template(theirs) or "", "utf-8")
        keys = {"chat_template": str(path)}
    rendered = renderer(tokenizer, PreferenceConfig, **keys)
    answers = {"chosen": "The sum is 5.", "rejected": "It is 6."}
    pair = rendered.encode_pair(Record({"prompt": ONE_TURN[:1], **answers}, "pairs.jsonl:1"))
    of_fields = renderer(tokenizer, PreferenceConfig, format="chat", prompt_template="{question}", **keys)
    same = of_fields.encode_pair(Record({"question": ONE_TURN[0]["content"], **answers}, "pairs.jsonl:2"))
    assert same.chosen.ids == pair.chosen.ids
    for side in (pair.chosen, pair.rejected):
        assert (side.ids[-1],) == (rendered.end_of_turn_ids or (tokenizer.eos_id,))
        assert len(side.ids) == len(side.trained) and side.trained[-1]


def test_the_context_of_an_answer_is_not_learned(families):
    tokenizer, _ = families["llama3"]
    context, answer = [*ONE_TURN, user("And 4 + 4?")], "That is 8."
    example = renderer(tokenizer).encode_example(Record({"prompt": context, "completion": answer}, "c.jsonl:1"))
    assert learned(tokenizer, example) == ["That is 8.<|eot_id|>"]
    sides = {"chosen": [*context, assistant("8")], "rejected": [*context, assistant("9")]}
    pair = renderer(tokenizer, PreferenceConfig).encode_pair(Record(sides, "c.jsonl:1"))
    assert learned(tokenizer, pair.chosen) == ["8<|eot_id|>"]


def test_a_prompt_is_the_conversation_up_to_the_last_user_or_tool_message(families):
    tokenizer, _ = families["llama3"]
    rendered = renderer(tokenizer, PromptsConfig)
    assert rendered.encode_prompt(record(TWO_TURNS)) == rendered.encode_prompt(record(TWO_TURNS[:3]))
    assert rendered.encode_prompt(record(WITH_TOOLS)) == rendered.encode_prompt(record(WITH_TOOLS[:3]))


def test_a_template_that_ends_turns_without_a_special_token_gets_eos(families, tmp_path, logged):
    tokenizer, _ = families["llama3"]
    file = tmp_path / "bare.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
                    "{% if add_generation_prompt %}assistant:\n{% endif %}")  # fmt: skip
    rendered = renderer(tokenizer, chat_template=str(file))
    assert learned(tokenizer, rendered.encode_example(record(ONE_TURN))) == ["The sum is 5.\n<|eot_id|>"]
    assert rendered.end_of_turn_ids == ()
    assert any("<eos> is appended" in message for message in logged)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_generation_stops_at_the_token_that_ends_a_turn(families, family):
    tokenizer, _ = families[family]
    rendered = renderer(tokenizer, format="chat")
    assert rendered.end_of_turn_ids == (tokenizer.eos_id,)
    assert renderer(tokenizer, format="plain").end_of_turn_ids == ()


def test_the_template_for_tools_is_used_for_conversations_with_tools(families):
    tokenizer, _ = families["llama3"]
    before = tokenizer.chat_templates
    tokenizer.chat_templates = {"default": "{{ messages[0].content }}", "tool_use": "TOOLS"}
    try:
        rendered = renderer(tokenizer, PromptsConfig)
        texts = [rendered.render_prompt(record(ONE_TURN, tools)) for tools in (None, TOOLS)]
    finally:
        tokenizer.chat_templates = before
    assert texts == ["What is 2 + 3?", "TOOLS"]


BAD = [
    ([{"role": "usr", "content": "hi"}], "message 1 has the unknown role 'usr'; did you mean 'user'?"),
    ([user("hi"), {"role": "assistant"}], "message 2 (assistant) has no 'content'"),
    ([{"from": "human", "value": "hi"}], "message 1 has no 'role' (its keys: from, value); rename 'from' to 'role'"),
    (["hi"], "message 1 is 'hi'; it must be a mapping"),
    ([user(3)], "message 1 (user): 'content' is 3; it must be a string"),
    ([user("hi"), {"role": "assistant", "tool_calls": [{"name": 3}]}], "call 1 of 'tool_calls' is {'name': 3}"),
    ([user("hi"), {"role": "assistant", "tool_calls": "f()"}], "'tool_calls' is 'f()'; it must be a list"),
    ([], "must be a list of messages with 'role' and 'content', but is []"),
    ([user("hi")], "the conversation has no assistant message to learn"),
]


@pytest.mark.parametrize(("messages", "words"), BAD)
def test_a_malformed_conversation_names_its_line_and_message(families, messages, words):
    with pytest.raises(ValueError) as error:
        renderer(families["qwen3"][0]).encode_example(record(messages))
    assert str(error.value).startswith("chats.jsonl:3: ") and words in str(error.value), error.value


def test_a_template_that_fails_names_its_line_and_the_record(families, tmp_path):
    tokenizer, _ = families["mistral"]
    with pytest.raises(ValueError, match=r"chats.jsonl:3: the tokenizer's chat template fails at line \d+: After"):
        renderer(tokenizer).encode_example(record([assistant("hi"), user("hi"), assistant("hi")]))
    file = tmp_path / "broken.jinja"
    for text, words in (
        ("{{ bos_token }}\n{% for m in messages %}", "at line 2: Unexpected end of template"),
        ("{{ messages[0].content.nothing() }}", "at line 1: 'str object' has no attribute 'nothing'"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError) as error:
            renderer(tokenizer, chat_template=str(file)).encode_example(record(ONE_TURN))
        assert words in str(error.value) and str(file) in str(error.value), error.value


def test_a_template_in_the_settings_is_that_of_a_file_with_its_text(families, tmp_path):
    tokenizer, _ = families["qwen3"]
    text = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
    (tmp_path / "short.jinja").write_text(text)
    of_file, of_text = (renderer(tokenizer, chat_template=each) for each in (str(tmp_path / "short.jinja"), text))
    assert of_text.encode_example(record(ONE_TURN)) == of_file.encode_example(record(ONE_TURN))
    assert of_text.render_prompt(record(ONE_TURN)).startswith(f"user: {ONE_TURN[0]['content']}")
    with pytest.raises(ValueError, match="data.chat_template fails at line 1: 'str object' has no attribute 'nothing'"):
        renderer(tokenizer, chat_template="{{ messages[0].content.nothing() }}").encode_example(record(ONE_TURN))


def test_bad_settings_are_refused(families, tmp_path):
    tokenizer, _ = families["qwen3"]
    with pytest.raises(ValueError, match="data.chat_template: there is no file"):
        renderer(tokenizer, format="chat", chat_template=str(tmp_path / "absent.jinja"))
    with pytest.raises(ValueError, match="data.prompt_template='Q' has no effect on records that are conversations"):
        renderer(tokenizer, prompt_template="Q").encode_example(record(ONE_TURN))
    mixed = renderer(tokenizer)
    mixed.encode_example(record(ONE_TURN))
    with pytest.raises(ValueError, match="sums.jsonl:1: the record has no messages, and chats.jsonl:3 is a conv"):
        mixed.encode_example(Record({"question": "1", "answer": "2"}, "sums.jsonl:1"))
    with pytest.raises(ValueError, match="data.system_prompt='Hi' has no effect with data.format=auto and records"):
        renderer(tokenizer, system_prompt="Hi").encode_prompt(Record({"question": "1"}, "sums.jsonl:1"))
    bare = load_tokenizer(write_tokenizer("llama3", tmp_path / "bare", chat_template=" "))
    bare.chat_templates = {}
    with pytest.raises(ValueError, match="data.format=chat needs a chat template, and the tokenizer has none"):
        renderer(bare, format="chat")


def test_the_file_whose_records_are_not_conversations_is_named(families, caplog):
    tokenizer, _ = families["qwen3"]
    for file in ("sums.jsonl", "dir/eval.jsonl"):
        renderer(tokenizer).encode_example(Record({"question": "1", "answer": "2"}, f"{file}:3"))
    logged = [entry.message for entry in caplog.records if "are not conversations" in entry.message]
    assert [message.partition(":")[0] for message in logged] == ["sums.jsonl", "dir/eval.jsonl"]


def test_conversations_and_records_without_messages_can_be_mixed_in_chat_format(families):
    tokenizer, _ = families["qwen3"]
    plain = Record({"question": ONE_TURN[0]["content"], "answer": ONE_TURN[1]["content"]}, "sums.jsonl:1")
    template = {"prompt_template": "{question}"}
    apart = [renderer(tokenizer, format="chat").encode_example(record(ONE_TURN)).ids]
    apart.append(renderer(tokenizer, format="chat", **template).encode_example(plain).ids)
    mixed = renderer(tokenizer, format="chat", **template)
    assert [mixed.encode_example(plain).ids, mixed.encode_example(record(ONE_TURN)).ids] == apart[::-1]
    assert apart[0] == apart[1], "the same messages became other tokens"


def test_a_chat_template_that_is_not_used_is_said_once(families, logged):
    tokenizer, _ = families["qwen3"]
    renderer(tokenizer, format="plain").encode_prompt(Record({"question": "1"}, "sums.jsonl:1"))
    assert not any("data.format=chat" in message for message in logged)
    renderer(tokenizer).encode_prompt(Record({"question": "1"}, "sums.jsonl:1"))
    assert sum("data.format=chat uses it" in message for message in logged) == 1
    renderer(tokenizer, prompt_template="<|im_start|>{question}").encode_prompt(Record({"question": "1"}, "s.jsonl:1"))
    task = renderer(tokenizer)
    task.encode_problem(Problem("<|im_start|>user\nhi", "1"))
    assert any("'<|im_start|>', which stays plain text" in message for message in logged)


def test_tools_may_be_json_and_calls_may_have_no_content(families):
    import json

    tokenizer, theirs = families["qwen3"]
    messages = [user("Weather?"), call("Rome")]
    rendered = renderer(tokenizer, trained_turns="last")
    example = rendered.encode_example(record(messages, json.dumps(TOOLS)))
    assert example.ids == theirs.apply_chat_template(messages, tools=TOOLS, return_dict=False)


def test_the_system_message_of_a_record_comes_before_that_of_the_settings(families):
    tokenizer, _ = families["llama3"]
    rendered = renderer(tokenizer, PromptsConfig, system_prompt="Other.")
    assert "Other." in rendered.render_prompt(record(ONE_TURN))
    assert "Other." not in rendered.render_prompt(record(WITH_SYSTEM))
    assert rendered.render_prompt(record([system("Other."), *ONE_TURN])) == rendered.render_prompt(record(ONE_TURN))


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_template_that_renders_no_text_names_the_record_and_the_file(families, tmp_path, logged, text):
    file = tmp_path / "empty.jinja"
    file.write_text(text)
    rendered = renderer(families["qwen3"][0], format="chat", chat_template=str(file))
    for encode in (rendered.encode_example, rendered.encode_prompt):
        with pytest.raises(ValueError, match="chats.jsonl:3: the chat template renders no text .*empty.jinja"):
            encode(record(ONE_TURN))
    assert rendered.end_of_turn_ids == ()
