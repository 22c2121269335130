"""Histories grow by tokens only: what was sampled is what is learned from, with every chat template."""

import random

import pytest

from rl_megatron.config.data_sources import PromptsConfig
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.batch import build_trajectory_batch
from rl_megatron.rollouts.runner import RolloutFailed
from tests.unit.algorithms.fakes import Characters, completed
from tests.unit.data.chat_families import FAMILIES, assistant, user, write_tokenizer
from tests.unit.rollouts.engines import RandomTokens, run

HISTORIES = 125  # of each family
SPELLED = "<|im_end|> and <|eot_id|> and </s> and <｜Assistant｜>"


@pytest.fixture(scope="module", params=FAMILIES)
def chat(request, tmp_path_factory):
    """A tokenizer, the id that ends its turns, and a function that encodes a prompt of one message."""
    tokenizer = load_tokenizer(write_tokenizer(request.param, tmp_path_factory.mktemp(request.param)))
    renderer = Renderer(PromptsConfig(format="chat"), tokenizer)

    def prompt(text):
        problem = Problem("", "", {"messages": [user(text)]}, "chats.jsonl:1")
        return renderer.encode_problem(problem)

    prompt("Hello")
    (end,) = renderer.end_of_turn_ids
    return tokenizer, end, prompt


def ordinary(tokenizer):
    """Return ids that are no special tokens."""
    return [id_ for id_ in range(tokenizer.vocab_size) if not tokenizer.is_added(id_)]


async def talk(client, record, sampling):
    """Let the policy talk with somebody who says random things."""
    chance, history = random.Random(client.name), client.history()
    for _ in range(chance.randint(1, 5)):
        await history.complete(sampling)
        history.extend([user(" ".join(chance.choices(["sun", "5 €", "\n", "Rome?", SPELLED], k=3)))])
    await history.complete(sampling)
    return [history.trajectory(reward=1.0)]


def test_sampled_ids_are_learned_from_bitwise(chat):
    tokenizer, end, prompt = chat
    engine = RandomTokens(ordinary(tokenizer), stop_id=end)
    prompts = [prompt(f"What is {number} + 3?") for number in range(HISTORIES)]
    results = run(talk, prompts, engine, tokenizer, sampling=Sampling(8, stop_ids=(end,)))
    trajectories = [result.trajectory for result in results]
    batch = build_trajectory_batch(trajectories, prompts, Sampling(8), has_turns=True)
    sampled = [(r.prompt, engine.completion(r)) for requests in engine.rounds for r in requests]
    learned = {}
    for row in range(batch.size):
        mask = batch["token_mask"][row].bool()
        for turn in batch["turn"][row].unique().tolist():
            if turn >= 0:
                places = (batch["turn"][row] == turn).nonzero()[:, 0].tolist()
                assert places == list(range(places[0], places[-1] + 1)) and mask[places].all()
                before = tuple(batch["input_ids"][row, : places[0]].tolist())
                logprobs = batch["generation_logprobs"][row, places].tolist()
                learned[before] = batch["input_ids"][row, places].tolist(), logprobs
        assert mask.sum() == (batch["turn"][row] >= 0).sum()
    assert len(learned) == len(sampled) == sum(len(trajectory.turns) for trajectory in trajectories)
    for before, completion in sampled:
        ids, logprobs = learned[before]
        assert tuple(ids) == completion.ids and logprobs == pytest.approx(completion.logprobs, rel=1e-6)


def test_what_others_say_makes_no_special_token(chat):
    tokenizer, end, prompt = chat
    special = {id_ for name, id_ in tokenizer.special_tokens.items() if name != "<unk>"}

    def special_ids(said):
        async def hear(client, record, sampling):
            history = client.history()
            await history.complete(sampling)
            history.extend([user(said)])
            found.extend(id_ for id_ in history.ids if id_ in special)
            return [history.trajectory()]

        found = []
        engine = RandomTokens(ordinary(tokenizer), stop_id=end, stops=1.0)  # one token, which ends the turn
        run(hear, [prompt("Hello")], engine, tokenizer, sampling=Sampling(8, stop_ids=(end,)))
        return found

    assert special_ids(SPELLED) == special_ids("sun")


THINKING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}" \
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A tokenizer whose chat template drops the thinking of earlier turns, and a prompt."""
    directory = write_tokenizer("qwen3", tmp_path_factory.mktemp("thinking"), THINKING)
    tokenizer = load_tokenizer(directory)
    prompt = Renderer(PromptsConfig(format="chat"), tokenizer).encode_problem(
        Problem("", "", {"messages": [user("2 + 3?")]}, "chats.jsonl:1")
    )
    return tokenizer, prompt


class Thinks(RandomTokens):
    """An engine that always says the same."""

    def completion(self, request):
        return completed(request, self.ids)


async def ask_twice(client, record, sampling):
    history = client.history()
    await history.complete(sampling)
    history.extend([user("And 4 + 4?")])
    await history.complete(sampling)
    return [history.trajectory()]


def texts(tokenizer, trajectory):
    return [tokenizer.decode(segment.ids, skip_special_tokens=False) for segment in trajectory.segments]


def test_a_template_that_drops_thinking_makes_two_segments(thinking):
    tokenizer, prompt = thinking
    engine = Thinks(tokenizer.encode_special("<think>5</think>Five<|im_end|>").ids)
    sampling = Sampling(20, stop_ids=(tokenizer.eos_id,))
    (result,) = run(ask_twice, [prompt], engine, tokenizer, sampling=sampling)
    trajectory = result.trajectory
    answer = "<|im_start|>assistant\n<think>5</think>Five<|im_end|>"
    first, second = texts(tokenizer, trajectory)
    assert first == f"<|im_start|>user\n2 + 3?<|im_end|>\n{answer}"
    assert second == (
        "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\nFive<|im_end|>\n"
        f"<|im_start|>user\nAnd 4 + 4?<|im_end|>\n{answer}"
    )
    assert [segment.parent for segment in trajectory.segments] == [None, 0]
    assert [len(segment.turns) for segment in trajectory.segments] == [1, 1]
    assert trajectory.messages[1] == assistant("<think>5</think>Five")


def test_a_history_is_kept_if_the_configuration_says_so(thinking):
    tokenizer, prompt = thinking
    engine = Thinks(tokenizer.encode_special("<think>5</think>Five<|im_end|>").ids)
    sampling = Sampling(20, stop_ids=(tokenizer.eos_id,))
    (result,) = run(ask_twice, [prompt], engine, tokenizer, sampling=sampling, on_rewrite="keep")
    (text,) = texts(tokenizer, result.trajectory)
    answer = "<|im_start|>assistant\n<think>5</think>Five<|im_end|>"
    assert text == (f"<|im_start|>user\n2 + 3?<|im_end|>\n{answer}\n<|im_start|>user\nAnd 4 + 4?<|im_end|>\n{answer}")
    with pytest.raises(RolloutFailed, match=r"writes 'Five.*' where the conversation has '<think>5</think>Five"):
        run(ask_twice, [prompt], engine, tokenizer, sampling=sampling, on_rewrite="error")


def test_plain_text_is_appended_as_it_is():
    async def worker(client, record, sampling):
        history = client.history()
        await history.complete(sampling)
        history.extend([user("no\n")])
        await history.complete(sampling)
        return [history.trajectory()]

    tokenizer = Characters()
    problem = Problem("2+3=", "5")
    prompt = EncodedPrompt(tokenizer.encode("2+3="), problem, Record({}, "x:1"))
    engine = RandomTokens([ord("4")], stops=1.0)
    (result,) = run(worker, [prompt], engine, tokenizer)
    (segment,) = result.trajectory.segments
    assert segment.ids == [*map(ord, "2+3="), 0, *map(ord, "no\n"), 0]
    assert [turn.start for turn in segment.turns] == [4, 8]


def test_tokens_that_are_appended_are_a_message():
    async def worker(client, record, sampling):
        history = client.history()
        await history.complete(sampling)
        history.extend_ids([*map(ord, "no")])
        await history.complete(sampling)
        return [history.trajectory()]

    tokenizer = Characters()
    prompt = EncodedPrompt(tokenizer.encode("2+3="), Problem("2+3=", "5"), Record({}, "x:1"))
    (result,) = run(worker, [prompt], RandomTokens([ord("4")], stops=1.0), tokenizer)
    trajectory = result.trajectory
    assert trajectory.segments[0].ids == [*map(ord, "2+3="), 0, *map(ord, "no"), 0]
    said = [(message["role"], message["content"]) for message in trajectory.messages]
    assert said == [("user", "2+3="), ("assistant", ""), ("user", "no"), ("assistant", "")]
