"""The file of completions: it goes on behind its last complete line, and only with the settings that made it."""

import json

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.generation.completions_file import CompletionsFile

SETTINGS = {"seed": 0, "sampling": {"top_k": 3, "stop_tokens": ("a", "b")}}


def lines(*numbers):
    """Return lines whose texts have ends of lines of their own."""
    return [{"prompt": number, "text": "ü\n\u2028"} for number in numbers]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def write(path, *numbers, settings=SETTINGS):
    """Open the file, append lines, and return how many it had before."""
    output = CompletionsFile(path, settings)
    try:
        before = output.open()
        output.append(lines(*numbers))
    finally:
        output.close()
    return before


def test_lines_are_added_to_those_of_an_earlier_command(path):
    assert write(path, 0, 1) == 0
    assert write(path, 2) == 2
    assert CompletionsFile(path, SETTINGS).read() == lines(0, 1, 2)


def test_an_incomplete_line_is_removed(path):
    write(path, 0, 1)
    with path.open("ab") as file:
        file.write(b'{"prompt": 2, "te')
    assert CompletionsFile(path, SETTINGS).count_lines() == 2
    assert write(path, 2) == 2
    assert [json.loads(line)["prompt"] for line in path.open()] == [0, 1, 2]


def test_a_file_of_an_incomplete_line_only_becomes_empty(path):
    write(path)
    path.write_text("{")
    assert write(path, 0) == 0
    assert CompletionsFile(path, SETTINGS).read() == lines(0)


@pytest.mark.parametrize("settings", [{**SETTINGS, "seed": 1}, {**SETTINGS, "sampling": {}}])
def test_other_settings_are_refused_and_named(path, settings):
    write(path, 0)
    (changed,) = [key for key in settings if settings[key] != SETTINGS[key]]
    with pytest.raises(ConfigError, match=rf"has completions of other settings \({changed}: .* → "):
        CompletionsFile(path, settings).count_lines()


def test_a_file_of_another_kind_is_refused(path):
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match="the settings of its completions are not known"):
        CompletionsFile(path, SETTINGS).count_lines()
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize(("name", "why"), [("", "is a directory"), ("a/b.jsonl", "a directory that does not exist")])
def test_a_path_that_cannot_be_a_file_is_refused(tmp_path, name, why):
    with pytest.raises(ConfigError, match=why):
        CompletionsFile(tmp_path / name, SETTINGS).count_lines()
