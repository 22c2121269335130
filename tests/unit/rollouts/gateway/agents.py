"""Sessions of the gateway in one process, without a server and without rounds."""

import asyncio
from functools import wraps

import httpx

from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.batch import build_trajectory_batch
from rl_megatron.rollouts.client import RolloutClient
from rl_megatron.rollouts.gateway.application import build_application
from rl_megatron.rollouts.gateway.session import Session
from tests.unit.algorithms.fakes import completed
from tests.unit.rollouts.engines import NO_LIMITS, RandomTokens


class Says(RandomTokens):
    """An engine that says one text after the other, each with a token that ends its turn."""

    def __init__(self, tokenizer, end, *texts):
        super().__init__([])
        self._answers = [[*tokenizer.encode_special(text).ids, end] for text in texts]

    def completion(self, request):
        ids = self._answers.pop(0)
        limit = request.sampling.max_new_tokens
        return completed(request, ids) if len(ids) <= limit else completed(request, ids[:limit], "length")


class Agent:
    """An agent with its session; requests go to the application directly."""

    def __init__(
        self, prompt, tokenizer, engine, sampling, limits=NO_LIMITS, parser=None, on_rewrite="branch", **kwargs
    ):
        self.engine, self.asked = engine, []
        self.waits = asyncio.Event()
        self.waits.set()
        self.client = RolloutClient("7-0", 1, prompt, sampling, tokenizer, limits, self._complete, on_rewrite)
        self.session = Session("http://gateway/v1", "the-key", self.client, sampling, parser, **kwargs)
        transport = httpx.ASGITransport(build_application({"the-key": self.session}.get))
        headers = {"Authorization": "Bearer the-key"}
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway/v1", headers=headers)

    async def _complete(self, request):
        self.asked.append(request)
        await self.waits.wait()
        return self.engine.completion(request)

    async def wait_until_asked(self, count=1):
        """Wait until the engine has got this many requests."""
        while len(self.asked) < count:
            await asyncio.sleep(0.001)

    async def send(self, path, **body):
        return await self.http.post(path, json=body)

    async def chat(self, *messages, **body):
        """Return the answer to messages, with token ids."""
        answer = await self.send("/chat/completions", messages=list(messages), return_token_ids=True, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path="/chat/completions", status=400, **body):
        """Return the error of a request."""
        answer = await self.send(path, **body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    def trajectory(self, **kwargs):
        """Return the trajectory, which has the tokens of the engine."""
        made = self.session.trajectory(**kwargs)
        self.client.check(made)
        return made


def acts(work):
    """Return a test that runs a coroutine function, for at most 20 seconds."""

    @wraps(work)
    def run(*arguments, **kwargs):
        asyncio.run(asyncio.wait_for(work(*arguments, **kwargs), 20))

    return run


def learned(agent, trajectory):
    """Return the completions that a batch of the trajectory teaches: (tokens before, tokens), each exactly once."""
    batch = build_trajectory_batch([trajectory], [agent.client.prompt], Sampling(8), has_turns=True)
    found = []
    for row in range(batch.size):
        turns = batch["turn"][row]
        assert batch["token_mask"][row].sum() == (turns >= 0).sum()
        for turn in turns[turns >= 0].unique().tolist():
            places = (turns == turn).nonzero()[:, 0].tolist()
            assert places == list(range(places[0], places[-1] + 1))
            ids = batch["input_ids"][row].tolist()
            found.append((tuple(ids[: places[0]]), tuple(ids[places[0] : places[-1] + 1])))
    return found
