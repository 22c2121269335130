"""A damaged metrics.jsonl: what can be read of it stays, and a warning names the line."""

import json
import logging

import pytest

from rl_megatron.observability.recorded_metrics import RecordedMetrics, read_metric_lines

LINES = [{"stage": "sft", "step": step, "kind": "train", "loss": 1 / step} for step in (1, 2, 3)]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path / "metrics.jsonl"


def test_a_line_that_a_killed_run_left_incomplete_is_left_out(path, caplog):
    path.write_bytes(path.read_bytes()[:-9])
    assert read_metric_lines(path) == LINES[:2]
    assert not caplog.records and not (path.parent / "metrics.damaged.jsonl").exists()


@pytest.mark.parametrize("damage", [b"\xe4", b"}", b"[1]\n"])
def test_a_damaged_line_is_left_out_with_a_warning_and_the_file_is_kept(path, caplog, monkeypatch, damage):
    monkeypatch.setattr(logging.getLogger("rl_megatron"), "propagate", True)
    content = path.read_bytes()
    place = content.index(b"\n") + 1
    path.write_bytes(content[:place] + damage + content[place:])
    whole = LINES if damage == b"[1]\n" else [LINES[0], LINES[2]]
    assert read_metric_lines(path) == whole
    assert "metrics.jsonl:2 is not a line of metrics" in caplog.text
    assert (path.parent / "metrics.damaged.jsonl").read_bytes() == path.read_bytes()


def test_a_change_of_lines_that_a_checkpoint_knows_is_said(path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rl_megatron"), "propagate", True)
    metrics = RecordedMetrics(path.parent)
    state = metrics.state_dict()
    with path.open("a") as file:
        file.write(json.dumps(LINES[0] | {"step": 4}) + "\n")
    metrics.load_state_dict(state)
    assert not caplog.records, "lines that were added later are no change"
    path.write_text(path.read_text().replace("0.5", "0.7"))
    metrics.load_state_dict(state)
    assert "has changed since the checkpoint was saved" in caplog.text
