"""What the tests do with the commands of the pages. This is the only file to edit when a page gets a new command.

Every bash and python block of README.md, CONTRIBUTING.md and docs/**/*.md is collected (collector.py), and:

- A command that starts `rl-megatron` (alone, by torchrun or by scripts/train.sh) is checked up to its first step: it is
  parsed, composed, compared with the number of ranks, and its data, loss and tokenizer are built. With --print-config
  it is composed only. You need to add nothing, unless it reads a file: add the file to INPUTS, under the page's name
  for it.
- On a page of RUN_IN_ORDER, the blocks are also run, one after the other in one directory, with small steps. A command
  that takes too long there goes to TOO_LONG_TO_RUN.
- A block with `title="path"` behind its fence, as in ```python title="my_configs/my_loss.py", is a file. It is written
  before the commands of its page are checked.
- A python block without a title is run, with the names of the page's earlier blocks, unless it is in PYTHON_NOT_RUN.
- Whatever is run and trains has to learn after its first step (learning.py), unless it is in TOO_SHORT_TO_LEARN.
- A page of RUN_BY_OTHER_TESTS is left to the test that is named there, which runs its commands.
- Any other command must match NOT_RUN, with the reason why it is not run, or SHELL, which runs it on the pages of
  RUN_IN_ORDER. The test fails for a command that matches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.docs import inputs

# Path in a command → the function that makes it there.
INPUTS: dict[str, Callable[[Path], None]] = {
    "path/to/gsm8k": inputs.word_problems,
    "path/to/my_data": inputs.word_problems,
    "path/to/pairs": inputs.preferences,
    "path/to/labelled.jsonl": inputs.labelled,
    "path/to/input.txt": inputs.text,
    "path/to/prompts.jsonl": inputs.prompts,
    "path/to/Qwen2.5-0.5B": inputs.hugging_face_model,
    "path/to/teacher": inputs.hugging_face_model,
    "examples/reward_model_ppo": inputs.reward_model_example,
}

# Pages whose blocks are run in order, as a reader would. Patterns are those of fnmatch.
RUN_IN_ORDER = (
    "docs/hugging_face.md",
    "docs/lora.md",
    "docs/quickstart.md",
)

# Pages whose commands another test runs, and compares what they give with what the page says.
RUN_BY_OTHER_TESTS = {
    "docs/adapters.md": "tests/end_to_end/test_adapters.py",
    "docs/training_service.md": "tests/end_to_end/test_tinker_sdk.py",
    "docs/checkpoints.md": "tests/end_to_end/test_checkpoints_page.py",
    "docs/tutorials/multi_turn.md": "tests/end_to_end/test_multi_turn.py",
    "docs/tutorials/*.md": "tests/end_to_end/test_examples.py",
}

# Regular expression of a command → why it is checked up to its first step only.
TOO_LONG_TO_RUN = {
    r"nproc-per-node [4-8]": "it starts more ranks than a small machine has cores; tests/parallel runs such layouts",
    r"engine=sglang": "it needs SGLang's environment; tests/parallel/test_sglang_engine.py runs the engine",
    r"engine=vllm": "it needs vLLM's environment; tests/end_to_end/test_vllm_engine.py runs the engine",
    r"engine=transformers": "its engine imports torch anew; tests/end_to_end/test_engines.py runs it",
}

# Regular expression of a command that does not start `rl-megatron` → why it is not run.
NOT_RUN = {
    r"git clone\b": "it needs the network",
    r"(pip|python -m pip) install ": "it needs the network; tests/packaging installs the wheel",
    r"(bash )?scripts/(install\w*|test|quickstart)\.sh": "it installs the package; tests/packaging runs the script",
    r"scripts/figures\.sh": "it takes half an hour; tests/test_figures.py tests its steps",
    r"scripts/gpu_bundle\.sh": "it needs the network, and minutes; tests/test_gpu_check.py tests its steps",
    r"scripts/gpu_check\.sh": "it needs a GPU; tests/packaging and tests/test_gpu_check.py run it on the CPU",
    r"\.ci/run": "it runs this test",
    r"(torchrun .*|python )(-m benchmarks\.|benchmarks/)": "it takes minutes; tests/test_benchmarks.py runs it small",
    r"(\w+=\S+ )*vllm serve": "it needs vLLM's environment; tests/vllm_servers.py starts such servers",
    r"python examples/reward_model_ppo/make_pairs\.py ": "an input of the next command; inputs.py runs it",
    r"docker ": "it needs a container runtime",
    r"mkdocs ": "tests/docs/test_site.py builds the site",
    r"tensorboard ": "it is a server",
    r"(source|cd|export|eval) ": "it changes the state of the reader's shell only",
}

# Regular expression of "page:first line of the block" or "page:command" → why it trains in fewer than two steps that
# have a gradient, so that no test sees whether it learns. All others have to (learning.py).
TOO_SHORT_TO_LEARN = {
    r"README.md:from rl_megatron import EmbeddedEngine": "it shows one step; examples/own_loss takes ten so",
    r"stages\.grpo\.train\.steps=2 ": "its few samples have equal rewards; test_examples.py has longer runs",
    r"docs/(lora|quickstart)\.md:.* experiment=quickstart": "the same",
}

# First words of commands that the shell itself runs, on the pages of RUN_IN_ORDER.
SHELL = ("cat", "cp", "echo", "head", "ls", "mkdir", "tail")

# "page:first line of the block" → why a python block is not run.
PYTHON_NOT_RUN = {
    "README.md:import rl_megatron": "it trains a real model; tests/end_to_end/test_from_python.py calls the function",
    "docs/coming_from/trl.md:rl_megatron.grpo(": "it is the same call with the settings of TRL's side",
    "docs/coming_from/trl.md:trainer = GRPOTrainer(": "it is TRL's side of a comparison, and needs a model of the Hub",
}
