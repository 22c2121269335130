"""A user's class with three methods is a task: by import string, without a dataclass and without registration."""

from __future__ import annotations

import pickle
import sys

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.sources import build_source
from rl_megatron.data.tasks import Problem, build_task

TASK = """
class Words:
    def __init__(self, letters=3):
        self.letters = letters

    def train_problems(self):
        return [("a" * self.letters, "1"), {"prompt": "b", "answer": 2, "level": 7}, ("c", "3")]

    def heldout_problems(self, count):
        return [("d", "4")]

    def reward(self, problem, completion):
        return float(completion == problem.answer)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """`task(replaced={})`: the import string of a file with the task above, after replacements in its text."""
    monkeypatch.chdir(tmp_path)

    def write(**replaced):
        text = TASK
        for old, new in replaced.items():
            text = text.replace(old, new)
        (tmp_path / "words.py").write_text(text)
        return f"{tmp_path / 'words.py'}:Words"

    return write


def test_a_class_with_three_methods_is_a_task(task):
    made = build_task(task(), letters=2)
    problems = made.train_problems()
    assert problems == [
        Problem("aa", "1"),
        Problem("b", "2", {"prompt": "b", "answer": 2, "level": 7}),
        Problem("c", "3"),
    ]
    assert made.heldout_problems(256) == [Problem("d", "4")]
    assert [made.reward(problems[0], text) for text in ("1", "2")] == [1.0, 0.0]
    assert made.demonstrations()[0][:2] == ("aa", "1")


def test_another_process_builds_the_task_from_its_import_string(task):
    made = pickle.dumps(build_task(task(), letters=2))
    for name in [name for name in sys.modules if name.startswith("words_")]:
        del sys.modules[name]
    assert pickle.loads(made).train_problems()[0] == Problem("aa", "1")


def test_some_problems_are_chosen_by_the_seed(task):
    made = build_task(task())
    chosen = {tuple(problem.prompt for problem in made.train_problems(2, seed)) for seed in range(8)}
    assert len(chosen) > 1 and all(len(prompts) == 2 for prompts in chosen)
    assert made.train_problems(2, 3) == made.train_problems(2, 3)
    with pytest.raises(ValueError, match="has 3 of these problems, and 4 were asked for"):
        made.train_problems(4)


def test_a_subclass_of_a_task_changes_its_reward_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = "    def reward(self, problem, completion):\n        return 0.5\n"
    (tmp_path / "odd.py").write_text(f"from rl_megatron.data.tasks import Arithmetic\nclass Odd(Arithmetic):\n{reward}")
    made = build_task("odd.py:Odd", max_operand=9)
    assert made.reward(made.heldout_problems(1)[0], "") == 0.5 and made.pretraining_documents(2)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"def reward": "def rewards"}, "has no method reward"),
        ({"self, problem, completion": "self, problem"}, r"reward is called with \(problem, completion\): too many"),
        ({"train_problems(self)": "train_problems(self, split)"}, "train_problems needs 'split'; it may take only"),
        ({'("c", "3")]': '"c"]'}, "item 2 of train_problems is 'c'; it must be a Problem, a pair"),
        ({"return [": "return 7 and ["}, None),
        ({'return [("d", "4")]': "return []"}, "heldout_problems returned no problem"),
        ({'return [("d", "4")]': "return 4"}, "heldout_problems returned a int, and not a list"),
        (
            {"return [(": "return {}['x'] and [("},
            r"data.task.name=.*words.py:Words: train_problems raised KeyError: 'x'",
        ),
        ({"return [(": "yield 1 / 0, [("}, r"data.task.name=.*words.py:Words: train_problems raised ZeroDivisionError"),
        ({"return [(": "return [(int('x'), "}, r"data.task.name=.*: train_problems raised ValueError: invalid literal"),
        (
            {'{"prompt": "b"': '{"prompt": ["b"]'},
            "item 1 of train_problems: the prompt of a problem is a list .*messages",
        ),
        ({"letters=3": "letters"}, "needs the option 'letters'"),
    ],
)
def test_what_is_wrong_with_a_task_is_named(task, replaced, message):
    text = task(**replaced)
    if message is None:
        build_task(text).check_files()
        return
    with pytest.raises(ValueError, match=message):
        build_task(text).check_files()


def test_an_unknown_option_names_the_nearest(task):
    with pytest.raises(ValueError, match="unknown option of task .*'leters'; did you mean 'letters'"):
        build_task(task(), leters=2)


def test_an_error_of_the_class_names_its_line(task):
    with pytest.raises(ConfigError, match=r"data.task.name=.*words.py:Words raised KeyError: 'x' \(.*words.py:4\)"):
        build_task(task(**{"self.letters = letters": "{}['x']"}))


def test_an_error_of_a_whole_task_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method = "    def heldout_problems(self, count=None, seed=0):\n        return {}['x']\n"
    (tmp_path / "odd.py").write_text(f"from rl_megatron.data.tasks import Arithmetic\nclass Odd(Arithmetic):\n{method}")
    stage = load_config(["algorithm=grpo", "data=arithmetic", "data.task.name=odd.py:Odd"]).first
    with pytest.raises(ConfigError, match=r"data.task.name=.*odd.py:Odd raised KeyError: 'x' \(.*odd.py:4\)"):
        build_source(stage).heldout(None)
