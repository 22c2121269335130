"""A library of the form of verifiers, which tests write into a directory of `sys.path`."""

from pathlib import Path

LIBRARY = """
class Dataset(list):
    pass


class Environment:
    requires_group_rollouts = False

    def __init__(self, train, heldout=None):
        self.dataset_source, self.dataset = None, train
        self.eval_dataset_source, self.eval_dataset = None, heldout

    def get_dataset(self):
        return self.dataset

    def get_eval_dataset(self):
        return self.eval_dataset

    async def run_rollout(self, input, client, model, sampling_args):
        answer = await client.native.completions.create(model=model, prompt=input["prompt"][-1]["content"])
        return await self.scored(input, answer.choices[0].text)
"""
CLIENTS = """
class OpenAIChatCompletionsClient:
    def __init__(self, native):
        self.native = native
"""
# The function of a test is `scored`: what an environment says about an answer.
ENVIRONMENT = """
import asyncio, os, pathlib, time
import verifiers

class Own(verifiers.Environment):
    async def scored(self, input, text):
        found = {{"metrics": {{"reward": 1.0, "letters": len(text)}}, "is_truncated": False, "stop_condition": "over"}}
        {scored}

def load_environment(num=4, heldout=0, **attributes):
    pathlib.Path(__file__).with_name("loads").open("a").write("x")
    parts = [
        [
            {{"prompt": [{{"role": "user", "content": f"{{part}}{{n}}="}}], "answer": str(n), "info": {{"n": n}}}}
            | {{"note": None}}
            for n in range(number)
        ]
        for part, number in (("train", num), ("heldout", heldout))
    ]
    made = Own(parts[0], parts[1] or None)
    vars(made).update(attributes)
    return made
"""


def write_library(directory: Path, scored: str = 'return found | {"reward": 0.5}') -> str:
    """Write the library and the module `own_env`; return the import string of its function.

    Args:
        directory: The directory.
        scored: The statement with which the environment scores the `text` that answers an `input`; it may use `found`.
    """
    (directory / "verifiers").mkdir()
    (directory / "verifiers" / "__init__.py").write_text(LIBRARY)
    (directory / "verifiers" / "clients.py").write_text(CLIENTS)
    file = directory / "own_env.py"
    file.write_text(ENVIRONMENT.format(scored=scored))
    return f"{file}:load_environment"
