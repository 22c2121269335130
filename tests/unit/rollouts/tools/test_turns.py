"""Conversations with tools stay exact to the token, also with templates that want calls as a list."""

from dataclasses import replace

import pytest

from rl_megatron.config.data_sources import PromptsConfig
from rl_megatron.config.environments import ToolsConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.chat_template import ChatTemplate
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.tools.toolbox import Tools
from rl_megatron.rollouts.tools.turns import check_tool_turns
from tests.unit.algorithms.fakes import completed
from tests.unit.data.chat_families import system, template_of, user, write_tokenizer
from tests.unit.rollouts.engines import RandomTokens, run
from tests.unit.rollouts.tools.hosts import HostsHere

SETTINGS = ToolsConfig(functions=("tests.unit.rollouts.tools.hosts:weather",))
BRIEF = [system("Be brief.")]
ROME, OSLO = "Rome: sunny", "Oslo: sunny sunny"
# Family → (format, the turns that the policy samples: one call, two calls, and an answer)
TALKS = {
    "qwen3": ("auto", [
        '<tool_call>\n{"name": "weather", "arguments": {"city":"Rome"}}\n</tool_call>',
        'Two:\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days":  2}}</tool_call>',
        "It is sunny.",
    ]),
    "llama3": ("llama", [
        '{"name": "weather", "parameters": {"city":"Rome"}}',
        '{"name":"weather","parameters":{"city":"Rome"}};{"name":"weather","parameters":{"city":"Oslo","days":2}}',
        "It is sunny.",
    ]),
    "mistral": ("auto", [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city":"Rome"}}]',
        '[TOOL_CALLS] [{"name":"weather", "arguments": {"city": "Rome"}},{"name": "weather", "arguments": '
        '{"city": "Oslo", "days": 2}}]',
        "It is sunny.",
    ]),
    "deepseek": ("hermes", [
        '<tool_call>{"name": "weather", "arguments": {"city":"Rome"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days":  2}}</tool_call>',
        "It is sunny.",
    ]),
}  # fmt: skip


def spelled(tokenizer, text):
    """Return ids of a text, which the tokenizer would not write so: one of its tokens stands in several."""
    id_of = {tokenizer.decode_token(id_): id_ for id_ in range(tokenizer.vocab_size)}
    ids = tokenizer.encode_special(text).ids
    for place, id_ in enumerate(ids):
        parts = [id_of.get(character) for character in tokenizer.decode_token(id_)]
        if len(parts) > 1 and not tokenizer.is_added(id_) and None not in parts:
            return [*ids[:place], *parts, *ids[place + 1 :]]
    raise AssertionError("no token can be split")


class Says(RandomTokens):
    """An engine that says the turns of a talk, one after the other."""

    def __init__(self, tokenizer, turns):
        super().__init__([])
        self.said = [[*spelled(tokenizer, turn), tokenizer.eos_id] for turn in turns]

    def completion(self, request):
        number = int(request.request_id.partition(".")[2] or 0)
        return completed(request, self.said[number])


def talk(family, directory, on_rewrite="error", before=()):
    """Return the trajectory of a conversation with three turns, the tokenizer, and the sampled ids of each turn."""
    format_, turns = TALKS[family]
    tokenizer = load_tokenizer(write_tokenizer(family, directory))
    prompt = Renderer(PromptsConfig(format="chat"), tokenizer).encode_problem(
        Problem("", "", {"messages": [*before, user("Rome or Oslo?")]}, "chats.jsonl:1")
    )

    async def asks(client, record, sampling):
        template, _ = client.prompt.chat()
        box = Tools(replace(SETTINGS, format=format_)).open_box(HostsHere(), template)
        history = client.history(tools=box.schemas)
        while True:
            await history.complete(sampling)
            answers, ends = await box.answer(box.find_calls(history.messages[-1]["content"]))
            if not answers or ends:
                return [history.trajectory(metadata=box.counts)]
            history.extend(answers)

    engine = Says(tokenizer, turns)
    sampling = Sampling(200, stop_ids=(tokenizer.eos_id,))
    (result,) = run(asks, [prompt], engine, tokenizer, sampling=sampling, on_rewrite=on_rewrite)
    return result.trajectory, tokenizer, engine.said


@pytest.mark.parametrize("family", TALKS)
def test_a_conversation_with_tools_is_one_segment_with_the_sampled_tokens(family, tmp_path):
    trajectory, tokenizer, said = talk(family, tmp_path)
    (segment,) = trajectory.segments
    assert [segment.ids[turn.start : turn.end] for turn in segment.turns] == said
    assert trajectory.metadata == {"tool_calls": 3, "tool_errors": 0, "malformed_calls": 0}
    one, two = segment.turns[0], segment.turns[1]
    first = tokenizer.decode(segment.ids[one.end : two.start], skip_special_tokens=False)
    second = tokenizer.decode(segment.ids[two.end : segment.turns[2].start], skip_special_tokens=False)
    assert first.count(ROME) == 1 and OSLO not in first
    assert second.count(ROME) == 1 and second.count(OSLO) == 1
    assert "5c1e07" not in tokenizer.decode(segment.ids, skip_special_tokens=False)


def test_answers_stand_behind_the_turns_as_the_template_writes_them(tmp_path):
    trajectory, tokenizer, _ = talk("mistral", tmp_path)
    (segment,) = trajectory.segments
    between = segment.ids[segment.turns[1].end : segment.turns[2].start]
    wanted = (
        f'[TOOL_RESULTS] {{"content": {ROME} , "call_id": "call00002"}}[/TOOL_RESULTS]'
        f'[TOOL_RESULTS] {{"content": {OSLO} , "call_id": "call00003"}}[/TOOL_RESULTS]'
    )
    assert between == tokenizer.encode_special(wanted).ids


def test_a_template_that_rewrites_its_past_around_calls_makes_segments(tmp_path):
    """The template of Mistral leaves the system prompt out once the last message is not the user's."""
    trajectory, tokenizer, said = talk("mistral", tmp_path, "branch", BRIEF)
    assert [segment.parent for segment in trajectory.segments] == [None, 0]
    assert [list(turn.completion.ids) for turn in trajectory.turns] == said
    first, second = (tokenizer.decode(each.ids, skip_special_tokens=False) for each in trajectory.segments)
    assert "Be brief." in first and "Be brief." not in second and "5c1e07" not in second
    assert second.count('[TOOL_CALLS] [{"name": "weather", "arguments": {"city":"Rome"}}]</s>') == 1
    kept, _, said = talk("mistral", tmp_path / "kept", "keep", BRIEF)
    (segment,) = kept.segments
    assert [segment.ids[turn.start : turn.end] for turn in segment.turns] == said
    assert segment.ids[segment.turns[0].end :][:5] == second_ids_behind(trajectory)


def second_ids_behind(trajectory):
    """Return the first tokens behind the first turn in the segment that the template wrote anew."""
    ids = list(trajectory.segments[1].ids)
    return ids[ids.index(0) + 1 :][:5]  # 0 is </s>, which ends the turn


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "it leaves 'ANSWER-5c1e07' out"),
        ("{{ raise_exception('no tools') }}", "no tools"),
        (
            template_of("mistral")
            .replace("[AVAILABLE_TOOLS] [", "[AVAILABLE_TOOLS] ")
            .replace('"[INST] " + message', 'messages | length ~ "[INST] " + message'),
            "renders earlier messages differently",
        ),
    ],
)
def test_a_template_without_answers_of_tools_is_refused(template, reason):
    chat = ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}, "the template")
    if reason is None:
        check_tool_turns(chat, [])
        return
    message = rf"rollout.tools.functions: the chat template cannot render messages of tools.*{reason}"
    with pytest.raises(ConfigError, match=message):
        check_tool_turns(chat, [])
