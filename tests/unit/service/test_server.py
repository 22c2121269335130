"""The service without a model: what it promises clients, whatever the operations compute."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from rl_megatron.service.api import Base
from rl_megatron.service.operations import Create, Operation, Outcome, Restore, Sample, Step, Unload
from rl_megatron.service.protobuf import new_message
from rl_megatron.service.server import Service, ServiceSettings
from rl_megatron.service.stops import StopRules
from rl_megatron.topology.ranks import Ranks
from tests.service_client import Client, RequestFailed
from tests.unit.service.cases import random_datums

ANNA, BEN = "tml-aaaaaaaaaaaaaaaaaaaa", "tml-bbbbbbbbbbbbbbbbbbbb"
BASE = Base("tiny", None, 1000, 64, StopRules((0,), ""))


class Executor:
    """It computes nothing, and notes what it was told; `before` is called with every operation.

    While `gate` is not set, operations wait.
    """

    def __init__(self, before: Callable[[Operation], object] = lambda operation: None):
        self.executed: list[str] = []
        self.kept = 0
        self.gate = threading.Event()
        self.gate.set()
        self._before = before

    def execute(self, operations):
        return [self._execute(operation) for operation in operations]

    def _execute(self, operation: Operation) -> Outcome:
        assert self.gate.wait(30)
        failure = self._before(operation)
        if isinstance(failure, str):
            return Outcome(failure.encode(), error="user")
        self.executed.append(operation.request_id)
        if isinstance(operation.work, Sample):
            return Outcome(new_message("SampleResponse").SerializeToString(), is_protobuf=True)
        return Outcome(json.dumps(operation.answer).encode())

    def keep(self, path):
        self.kept += 1
        path.mkdir(parents=True)


@pytest.fixture
def serve(tmp_path):
    """`serve(executor, base, **settings)`: a context with a running service, by default in tmp_path / "service"."""
    given = ServiceSettings("127.0.0.1", 0, tmp_path / "service", {ANNA: "anna", BEN: "ben"})

    @contextmanager
    def running(executor, base=BASE, **changes):
        settings = replace(given, **changes)
        settings.directory.mkdir(exist_ok=True)
        service = Service(executor, base, settings, Ranks(), 60)
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            yield service
        finally:
            executor.gate.set()
            service.stop()
            thread.join(30)
            service.close()
            assert not thread.is_alive()

    return running


def wait_until(holds):
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def send_step(client, run):
    """Send an optimizer step, and return its future."""
    return client.post("optim_step", {"model_id": run, "seq_id": client.next_seq(run), "adam_params": {}})


def data_of(num_bytes):
    return random_datums(num_bytes // 100, "cross_entropy", "next tokens", 0)


def test_unfinished_requests_of_a_key_have_limited_bytes(serve):
    """What another key sends does not count, nor what is done."""
    executor = Executor()
    with serve(executor, most_pending_bytes=20_000) as service:
        anna, ben = Client(service.url, ANNA), Client(service.url, BEN)
        runs = [client.create("tiny", 2, 0) for client in (anna, ben)]
        executor.gate.clear()
        futures = []
        with pytest.raises(RequestFailed, match="429: .*unfinished requests of 20000 bytes"):
            for seq in range(1, 20):
                futures.append(anna.send_loss(runs[0], data_of(5000), "cross_entropy", seq=seq))
        assert len(futures) >= 2
        ben.send_loss(runs[1], data_of(5000), "cross_entropy")
        executor.gate.set()
        for future in futures:
            anna.wait(future)
        for later in range(4):
            anna.wait(anna.send_loss(runs[0], data_of(5000), "cross_entropy", seq=seq + later))


def test_a_key_sends_limited_bytes_at_the_same_time(serve):
    with serve(Executor(), most_bytes=2000, most_pending_bytes=1000) as service:
        client = Client(service.url, ANNA)
        with pytest.raises(RequestFailed, match="429: .*more than 1000 bytes at the same time"):
            client.post("telemetry", b"x" * 1500)
        with pytest.raises(RequestFailed, match="413: .*more than 2000 bytes"):
            client.post("telemetry", b"x" * 2500)
        for _ in range(2):
            client.post("telemetry", b"x" * 900)


def test_the_metadata_of_a_session_are_limited(serve):
    with serve(Executor()) as service:
        client = Client(service.url, ANNA)
        with pytest.raises(RequestFailed, match="413: .*metadata must have at most 65536 bytes"):
            client.post("create_session", {"user_metadata": {"x": "y" * 10**5}})


def test_runs_of_silent_sessions_are_unloaded(serve):
    unloaded = []

    def note(operation):
        if isinstance(operation.work, Unload):
            unloaded.append(operation.run)

    executor = Executor(note)
    with serve(executor, silent_seconds=0.5) as service:
        silent, heard = Client(service.url, ANNA), Client(service.url, ANNA)
        runs = [client.create("tiny", 2, 0) for client in (silent, heard)]

        def beat():
            heard.post("session_heartbeat", {"session_id": heard.session})
            return unloaded

        wait_until(beat)
        assert unloaded == runs[:1]
        with pytest.raises(RequestFailed, match="there is no training run"):
            silent.step(runs[0])
        heard.step(runs[1])


def test_requests_of_a_run_that_could_not_be_made_fail(serve):
    executor = Executor(lambda operation: "no memory is left" if isinstance(operation.work, Create) else None)
    with serve(executor) as service:
        client = Client(service.url, ANNA)
        executor.gate.clear()
        body = {
            "session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2},
        }  # fmt: skip
        created = client.post("create_model", body)
        step = send_step(client, created["model_id"])
        executor.gate.set()
        with pytest.raises(RequestFailed, match="no memory is left"):
            client.wait(created)
        with pytest.raises(RequestFailed, match="could not be made"):
            client.wait(step)
        assert executor.executed == []


def test_only_samples_can_be_cancelled(serve):
    executor = Executor()
    with serve(executor) as service:
        client = Client(service.url, ANNA)
        run = client.create("tiny", 2, 0)
        executor.gate.clear()
        step, sampler = send_step(client, run), {"base_model": "tiny", "num_samples": 1}
        prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
        sample = client.post("asample", {**sampler, "prompt": prompt, "sampling_params": {"max_tokens": 1}})
        for future in (step, sample):
            client.post("cancel_future", {"request_id": future["request_id"]})
        executor.gate.set()
        client.wait(step)
        with pytest.raises(RequestFailed, match="410: "):
            client.wait(sample)
        client.step(run)
        assert sample["request_id"] not in executor.executed


def test_a_request_that_is_sent_twice_is_executed_once(serve):
    executor = Executor()
    with serve(executor) as service:
        client = Client(service.url, ANNA)
        run = client.create("tiny", 2, 0)
        body = {"model_id": run, "seq_id": 1, "adam_params": {}}
        with ThreadPoolExecutor(8) as threads:
            futures = list(threads.map(lambda _: Client.post(client, "optim_step", body), range(8)))
        assert len({future["request_id"] for future in futures}) == 1
        for future in futures:
            client.wait(future)
        assert executor.executed.count(f"{run}:1") == 1


def test_a_repeated_request_is_not_acknowledged_before_the_first_is_on_the_disk(serve, monkeypatch):
    with serve(Executor()) as service, ThreadPoolExecutor(2) as threads:
        client = Client(service.url, ANNA)
        run, sync, may_sync = client.create("tiny", 2, 0), os.fsync, threading.Event()

        def sync_later(number):
            assert may_sync.wait(20)
            sync(number)

        monkeypatch.setattr(os, "fsync", sync_later)
        body = {"model_id": run, "seq_id": 1, "adam_params": {}}
        answers = [threads.submit(client.post, "optim_step", body) for _ in range(2)]
        try:
            with pytest.raises(TimeoutError):
                next(as_completed(answers, timeout=0.3))
        finally:
            may_sync.set()
        assert answers[0].result() == answers[1].result()
        client.wait(answers[0].result())


def test_a_verb_that_is_not_there_fails_in_its_turn(serve):
    """The requests after it are not held up."""
    with serve(Executor(lambda operation: getattr(operation.work, "message", None))) as service:
        client = Client(service.url, ANNA)
        run = client.create("tiny", 2, 0)
        with pytest.raises(RequestFailed, match="save_weights_external is not a verb of this server"):
            client.wait(client.post("save_weights_external", {"model_id": run, "seq_id": client.next_seq(run)}))
        client.step(run)


def test_clones_of_a_sampler_have_numbers_of_their_own(serve):
    with serve(Executor()) as service:
        client = Client(service.url, ANNA)
        body = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": "tiny"}
        sampler = client.post("create_sampling_session", body)["sampling_session_id"]
        joined = [client.post("join_sampling_session", {"sampling_session_id": sampler}) for _ in range(3)]
        assert len({answer["client_counter"] for answer in joined}) == 3
        clone = 7
        request = client.post(
            "asample",
            {
                "sampling_session_id": sampler, "seq_id": clone * 10**9 + 1, "sampling_params": {"max_tokens": 1},
                "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            },
        )  # fmt: skip
        target = {"sampling_session_id": sampler, "cloned_sampler_id": clone}
        done = client.post("retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 20.0})
        assert done["completions"] == [{"state": "finished", "request_id": request["request_id"]}]
        other = {**target, "cloned_sampler_id": 8}
        assert not client.post("retrieve_futures", {"target": other, "timeout": 0.0})["completions"]


class TestANewStart:
    """A server that is killed, and started again: its directory is copied while the first one runs."""

    def test_a_stop_while_lost_operations_are_repeated_keeps_the_journal(self, serve, tmp_path):
        first = Executor()
        with serve(first) as service:
            client = Client(service.url, ANNA)
            run = client.create("tiny", 2, 0)
            for _ in range(3):
                client.step(run)
            shutil.copytree(tmp_path / "service", tmp_path / "again")
        stopped = Executor(lambda operation: service.stop())
        with serve(stopped, directory=tmp_path / "again") as service:
            wait_until(lambda: stopped.executed)
        assert len(stopped.executed) < len(first.executed) and stopped.kept == 0
        last = Executor()
        with serve(last, directory=tmp_path / "again") as service:
            wait_until(lambda: last.executed == first.executed)
            client = Client(service.url, ANNA)
            client.wait({"request_id": f"{run}:3"})
        assert last.kept == 1

    def test_kept_states_are_restored_and_what_came_later_is_repeated(self, serve, tmp_path):
        with serve(Executor(), keep_seconds=-1.0) as service:
            client = Client(service.url, ANNA)
            run = client.create("tiny", 2, 0)
            client.step(run)
            wait_until(lambda: len(list((tmp_path / "service" / "state").iterdir())) == 1)
        restored = []
        again = Executor(lambda operation: restored.append(operation.work))
        with serve(again) as service:
            client = Client(service.url, ANNA)
            client.wait(client.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}}))
        assert isinstance(restored[0], Restore)
        assert again.executed == [f"restore {run}", f"{run}:2"]

    def test_a_request_that_kills_the_server_again_and_again_is_given_up(self, serve, tmp_path):
        places = [tmp_path / "service", *(tmp_path / f"again {number}" for number in range(3))]
        for place, later in zip(places[:-1], places[1:], strict=True):

            def copy(operation, place=place, later=later):
                if isinstance(operation.work, Step):
                    shutil.copytree(place, later)  # what a kill would leave here

            with serve(Executor(copy), directory=place) as service:
                client = Client(service.url, ANNA)
                if place is places[0]:
                    run = client.create("tiny", 2, 0)
                    step = send_step(client, run)
                client.wait(step)
        last = Executor()
        with serve(last, directory=places[-1]) as service:
            client = Client(service.url, ANNA)
            with pytest.raises(RequestFailed, match="the server died several times while it executed this request"):
                client.wait(step)
            client.wait(client.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}}))
        assert step["request_id"] not in last.executed

    def test_a_request_that_no_longer_means_anything_fails_in_its_turn(self, serve, tmp_path):
        """For example, one that an older server accepted, whose base had another vocabulary."""
        executor = Executor()
        with serve(executor) as service:
            client = Client(service.url, ANNA)
            run = client.create("tiny", 2, 0)
            executor.gate.clear()
            (datum,) = random_datums(1, "cross_entropy", "next tokens", 0)
            high = replace(datum, tokens=np.full_like(datum.tokens, 999))
            futures = [client.send_loss(run, [high], "cross_entropy"), send_step(client, run)]
            shutil.copytree(tmp_path / "service", tmp_path / "again")
        again = Executor(lambda operation: getattr(operation.work, "message", None))
        with serve(again, replace(BASE, vocab_size=500), directory=tmp_path / "again") as service:
            client = Client(service.url, ANNA)
            with pytest.raises(RequestFailed, match="has the token 999"):
                client.wait(futures[0])
            client.wait(futures[1])
