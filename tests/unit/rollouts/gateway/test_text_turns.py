"""A prompt of /v1/completions goes on behind the turn that a search of all turns finds."""

import json
import random

from tests.unit.rollouts.engines import RandomTokens
from tests.unit.rollouts.gateway.agents import acts

SESSIONS = 30  # of about 25 requests


def search(turns, prompt):
    """Return the turn that a prompt goes on behind, and the rest of the prompt, by comparing it with every turn.

    Args:
        turns: The turns in their order, each with its prompt if that was text.
        prompt: The prompt.
    """
    best = None, prompt
    for turn, prompt_text in turns:
        if not turn.is_heard or (isinstance(prompt, str) and prompt_text is None):
            continue
        (*_, last) = turn.branch.history.segments(turn.number)
        known = prompt_text + (turn.answered.content or "") if isinstance(prompt, str) else list(last.ids)
        if len(prompt) > len(known) and prompt[: len(known)] == known:
            found, rest = best
            left = prompt[len(known) :]
            is_preferred = turn.can_grow and found is not None and not found.can_grow
            if len(left) < len(rest) or (len(left) == len(rest) and is_preferred):
                best = turn, left
    return best


def some_prompt(chance, turns, ids):
    """Return a prompt: the history of a turn, or a part of it, and what follows; or another one."""
    is_text = chance.random() < 0.5
    new = "".join(chance.choices("ab", k=chance.randint(1, 2))) if is_text else chance.choices(ids, k=2)
    if not turns or chance.random() < 0.2:
        return new
    turn, prompt_text = chance.choice(turns[-6:])
    (*_, last) = turn.branch.history.segments(turn.number)
    known = list(last.ids)
    if is_text:
        known = (prompt_text or "a") + (turn.answered.content or "")
    if chance.random() < 0.3:
        known = known[: chance.randint(1, len(known))]
    return known + new if chance.random() < 0.9 else known


@acts
async def test_prompts_of_random_agents_go_on_behind_the_turn_that_a_search_finds(qwen):
    ids = [qwen.tokenizer.encode(letter)[0] for letter in "ab"]
    num_known = num_shared = 0
    for seed in range(SESSIONS):
        chance, turns = random.Random(seed), []
        agent = qwen.agent(engine=RandomTokens(ids, stop_id=qwen.end, stops=0.5), max_new_tokens=2)
        for _ in range(chance.randint(20, 30)):
            prompt = some_prompt(chance, turns, ids)
            expected = search(turns, prompt)
            assert agent.session.texts.match(prompt) == expected, (seed, prompt)
            num_known += expected[0] is not None
            num_shared += expected[0] is not None and not expected[0].can_grow
            choices = await agent.session.answer_text(
                json.dumps({"prompt": prompt, "n": chance.choice([1, 1, 2]), "stop": "ba"}).encode()
            )
            turns += [(turn, prompt if isinstance(prompt, str) else None) for turn in choices.turns]
            if chance.random() < 0.1:
                agent.session.ignore(choices)
    assert num_known > 200 and num_shared > 50
