"""What reaches a terminal or a log: no text of a model, an agent or a data file can control it."""

import argparse
import sys

from rl_megatron import log
from rl_megatron.cli.rollouts import rollouts

# OSC 52 writes the clipboard, OSC 0 the title, CSI moves the cursor, C1 is CSI in one character, and the last ones turn
# the direction of writing.
CONTROLS = (
    "\x1b]52;c;aGk=\x07",
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[1;1H",
    "\x9b31m",
    "\r",
    "\x08",
    "\x7f",
    "\u202e",
    "\u2066",
)
EVIL = "a".join(CONTROLS)


def controls_of(text):
    return [character for character in text if character in "".join(CONTROLS) and not character.isascii()] + [
        character for character in text if character < " " and character not in "\n\t"
    ]


def test_controls_are_escaped_and_text_stays():
    assert log.escape_controls("a\x1b[0m\u202eb\x9b\ud83d") == r"a\x1b[0m\u202eb\x9b\ud83d"
    text = "line\n\ttab, naïve, 中文, अनु\u200dवाद, 👩\u200d🚀, \xa0"
    assert log.escape_controls(text) == text
    assert controls_of(EVIL) and controls_of(log.escape_controls(EVIL)) == []


def test_messages_errors_and_tracebacks_cannot_control_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for owner, name in ((log.LOGGER, "handlers"), (log.LOGGER, "propagate"), (sys, "excepthook")):
        monkeypatch.setattr(owner, name, [] if name == "handlers" else getattr(owner, name))
    log.setup()
    log.error(f"its output ends: {EVIL}")
    log.LOGGER.warning("the answer is %s", EVIL)
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        log.LOGGER.error("failed", exc_info=True)
        sys.excepthook(type(error), error, error.__traceback__)
    printed = capsys.readouterr()
    assert printed.err.count(r"\x1b]52") >= 4 and controls_of(printed.out + printed.err) == []


def test_rollouts_are_shown_without_controls(capsys, monkeypatch, tmp_path):
    row = {"step": 1, "round": 0, "number": 0, "group": 0, "reward": 0.5, "stopped": True, "is_learned_from": True,
           "age": 0, "prompt": EVIL, "completion": f"fine{EVIL}"}  # fmt: skip
    (tmp_path / "step-000001.parquet").touch()
    monkeypatch.setattr("rl_megatron.rollouts.rows.read_rows", lambda *arguments: [row])
    options = argparse.Namespace(
        path=tmp_path, step=None, stage=None, json=False, min_reward=None, max_reward=None, prompt=None, limit=5
    )
    assert rollouts(options) == 0
    printed = capsys.readouterr().out
    assert r"\x1b]52" in printed and "fine" in printed and controls_of(printed) == []
