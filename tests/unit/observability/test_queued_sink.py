"""A sink in a thread of its own: one that blocks or raises neither stops nor slows a run."""

import json
import logging
import threading
import time

import pytest

from rl_megatron import log
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.sinks import MetricLine, QueuedSink


class Kept:
    """A sink that keeps every call. `block` is waited for, and `fails` says which steps are refused."""

    def __init__(self, block=None, fails=()):
        self.calls, self.began = [], threading.Event()
        self._block, self._fails = block, fails

    def begin_stage(self, stage, start):
        self.calls.append((stage, start))

    def write(self, line):
        self.began.set()
        if self._block is not None:
            self._block.wait()
        if line.step in self._fails:
            raise OSError(f"no space for step {line.step}")
        self.calls.append(line.step)

    def close(self):
        self.calls.append("close")


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(log.LOGGER, "warning", lambda text, *args: said.append(text % args))
    return said


@pytest.fixture
def block():
    """An event that a blocking sink waits for; it is set after the test, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def line(step):
    return MetricLine("sft", step, "train", {"loss": 1.0 / step}, 0.1)


def test_a_sink_gets_every_call_in_order_and_in_one_thread(warnings):
    kept, threads = Kept(), []

    def opened():
        threads.append(threading.current_thread())
        return kept

    queued = QueuedSink("kept", opened)
    queued.begin_stage("sft", 0)
    queued.write(line(1))
    queued.begin_stage("grpo", 2)
    queued.write(line(3))
    queued.close()
    assert kept.calls == [("sft", 0), 1, ("grpo", 2), 3, "close"]
    assert threads[0] is not threading.current_thread()
    assert warnings == []


def test_a_sink_that_blocks_does_not_block_the_run_and_what_it_lacks_is_counted(block, warnings):
    kept = Kept(block)
    queued = QueuedSink("slow", lambda: kept, max_lines=3, close_seconds=0.05)
    queued.write(line(1))
    assert kept.began.wait(60), "the sink got no line"
    for step in range(2, 12):
        queued.write(line(step))
    queued.close()
    assert kept.calls == []
    assert len(warnings) == 2, warnings
    assert "metric sink slow does not keep up with the run, and 3 lines wait" in warnings[0]
    assert "metric sink slow did not finish within 0.05 s" in warnings[1] and "11 of 11 lines may be" in warnings[1]


def test_lines_that_the_full_queue_dropped_are_counted_at_the_end(block, warnings):
    kept = Kept(block)
    queued = QueuedSink("slow", lambda: kept, max_lines=3)
    queued.write(line(1))
    assert kept.began.wait(60), "the sink got no line"
    for step in range(2, 12):
        queued.write(line(step))
    block.set()
    queued.close()
    assert kept.calls == [1, 2, 3, 4, "close"]
    assert warnings[1:] == ["metric sink slow lacks 7 of 11 lines"]


def test_a_sink_that_raises_is_said_once_and_gets_the_other_lines(warnings):
    kept = Kept(fails=(2, 3))
    queued = QueuedSink("full", lambda: kept)
    for step in range(1, 5):
        queued.write(line(step))
    queued.close()
    assert kept.calls == [1, 4, "close"]
    assert len(warnings) == 2 and "metric sink full OSError: no space for step 2" in warnings[0]
    assert warnings[1] == "metric sink full lacks 2 of 4 lines"


def test_a_sink_that_cannot_be_opened_is_tried_again_and_gets_the_lines_that_waited(warnings):
    kept, attempts = Kept(), []

    def opened():
        attempts.append(None)
        if len(attempts) < 3:
            raise ConnectionError("no network")
        return kept

    queued = QueuedSink("far", opened, retry_seconds=0.0)
    queued.write(line(1))
    assert kept.began.wait(60), "the sink was not opened again"
    queued.close()
    assert kept.calls == [1, "close"]
    assert len(warnings) == 1 and "cannot be opened" in warnings[0] and "no network" in warnings[0]


def test_a_sink_that_is_never_opened_does_not_delay_the_end(warnings):
    tried = threading.Event()

    def opened():
        tried.set()
        raise ConnectionError("no network")

    queued = QueuedSink("far", opened, retry_seconds=3600.0)
    queued.write(line(1))
    assert tried.wait(60)
    queued.close()
    assert warnings[-1] == "metric sink far lacks 1 of 1 lines"


def test_services_that_hang_delay_the_end_together(block, warnings):
    sinks = [QueuedSink(name, lambda: Kept(block), close_seconds=0.4) for name in "abc"]
    for sink in sinks:
        sink.write(line(1))
        sink.begin_to_close()
    began = time.monotonic()
    for sink in sinks:
        sink.close()
    assert time.monotonic() - began < 1.0 and len(warnings) == 3


def test_a_sink_is_told_that_the_run_has_failed():
    kept = Kept()
    kept.fail = lambda: kept.calls.append("fail")
    sink = QueuedSink("mine", lambda: kept)
    sink.begin_to_close(has_failed=True)
    sink.close()
    assert kept.calls == ["fail", "close"]


def test_a_message_hides_the_password_of_an_address(warnings):
    def opened():
        raise ConnectionError("https://me:hunter2@host refused")

    queued = QueuedSink("far", opened, retry_seconds=3600.0)
    queued.close()
    assert "https://***@host refused" in warnings[0]


@pytest.mark.change
@pytest.mark.parametrize("service", ["blocks", "raises"])
def test_a_bad_service_leaves_metrics_jsonl_as_it_is_without_one(service, block, tmp_path, monkeypatch, caplog):
    class ImpatientSink(QueuedSink):
        def __init__(self, name, open_sink):
            super().__init__(name, open_sink, close_seconds=0.05)

    monkeypatch.setattr("rl_megatron.observability.metrics_logger.QueuedSink", ImpatientSink)
    caplog.set_level(logging.WARNING)
    sink = Kept(block if service == "blocks" else None, fails=range(100))
    written = []
    for services in ({}, {"bad": lambda: sink}):
        directory = tmp_path / str(len(services))
        directory.mkdir()
        logger = MetricsLogger(directory, enabled=True, sinks=("jsonl",), services=services)
        logger.begin_stage("sft", 0, 5)
        for step in range(1, 6):
            logger.record(step, {"loss": 1.0 / step})
        logger.close()
        lines = [json.loads(each) for each in (directory / "metrics.jsonl").read_text().splitlines()]
        written.append([{key: value for key, value in each.items() if key != "seconds"} for each in lines])
    assert len(written[0]) == 5 and written[0] == written[1]
    assert 1 not in sink.calls
