"""A tokenizer with a chat template, and agents that talk to a policy which says what a test wants."""

import pytest

from rl_megatron.config.data_sources import PromptsConfig
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Sampling
from tests.unit.data.chat_families import user, write_tokenizer
from tests.unit.rollouts.gateway.agents import Agent, Says


class Family:
    """A family's tokenizer and its chat template."""

    def __init__(self, directory, template=None, family="qwen3"):
        self.tokenizer = load_tokenizer(write_tokenizer(family, directory, template))
        self.renderer = Renderer(PromptsConfig(format="chat"), self.tokenizer)
        self.prompt = self.renderer.encode_problem(Problem("", "", {"messages": [user("Hello")]}, "chats.jsonl:1"))
        (self.end,) = self.renderer.end_of_turn_ids
        self.ordinary = [id_ for id_ in range(self.tokenizer.vocab_size) if not self.tokenizer.is_added(id_)]

    def agent(self, *texts, engine=None, max_new_tokens=200, **kwargs):
        """Return an agent of a policy that says the texts."""
        engine = engine or Says(self.tokenizer, self.end, *texts)
        return Agent(self.prompt, self.tokenizer, engine, Sampling(max_new_tokens, stop_ids=(self.end,)), **kwargs)


@pytest.fixture(scope="package")
def qwen(tmp_path_factory):
    """Qwen 3's tokenizer and template."""
    return Family(tmp_path_factory.mktemp("qwen"))
