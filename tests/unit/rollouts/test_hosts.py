"""Processes that hold users' objects: they survive whatever an object does, and only the guilty call fails."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rl_megatron
from rl_megatron.rollouts.hosts import HostedCallFailed, HostLimits, HostLost, ProcessHosts
from tests.child_processes import children_with

FILE = str(Path(__file__).parent / "hosted_file.py")
THING = f"{FILE}:Thing"


class HostsOnALoop:
    """Processes whose loop runs in a thread of its own, as that of rank 0 does."""

    def __init__(self, count):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.hosts = ProcessHosts(count, HostLimits(1024, 1 << 20), "tests")

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.hosts.close()


@pytest.fixture(scope="module")
def on_loop():
    made = HostsOnALoop(1)
    yield made
    made.close()


@pytest.fixture
def thing(on_loop):
    """An object that is closed after the test."""
    made = on_loop.run(on_loop.hosts.make(THING, {"start": 1}, 20.0))
    yield made
    on_loop.run(made.close())


def test_an_object_keeps_its_state_between_calls(on_loop, thing):
    assert [on_loop.run(thing.call("add", number, timeout=5.0)) for number in (1, 5)] == [2, 7]
    assert on_loop.run(thing.call("with_a_loop_of_its_own", timeout=5.0)) == 7


def test_plain_data_comes_back_whatever_is_printed(on_loop, thing):
    assert on_loop.run(thing.call("misbehave", "print", timeout=5.0)) is None
    returned = on_loop.run(thing.call("misbehave", "numbers", timeout=5.0))
    assert returned == (4, {"b": (1.5, None)}, {1, 2}) and type(returned[0]) is int


def test_async_methods_of_many_objects_wait_at_the_same_time(on_loop):
    async def wait():
        made = await asyncio.gather(*(on_loop.hosts.make(THING, {"start": n}, 20.0) for n in range(200)))
        began = time.monotonic()
        values = await asyncio.gather(*(each.call("wait", 0.3, timeout=20.0) for each in made))
        seconds = time.monotonic() - began
        await asyncio.gather(*(each.close() for each in made))
        return values, seconds

    values, seconds = on_loop.run(wait())
    assert values == list(range(200)) and seconds < 10 * 0.3


FAILURES = {
    "raise": r"Thing.misbehave\(\) in a worker process raised ValueError: on purpose \(/.*hosted_file.py:\d+\)",
    "leave": r"raised SystemExit: 0",
    "object": r"returned a Thing \(the result\['a'\]\[0\]\), which cannot leave the process",
    "megabytes": r"returned 50000\d\d bytes, but may return at most 1048576",
    "eat": r"raised MemoryError",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_call_that_fails_leaves_the_process_alone(on_loop, thing, how):
    before = on_loop.run(on_loop.hosts.call(f"{FILE}:process_of", {"place": 0}, 5.0))
    with pytest.raises(HostedCallFailed, match=FAILURES[how]):
        on_loop.run(thing.call("misbehave", how, timeout=20.0))
    assert on_loop.run(thing.call("add", 0, timeout=5.0)) == 1
    assert on_loop.run(on_loop.hosts.call(f"{FILE}:process_of", {"place": 0}, 5.0)) == before


def test_an_async_call_that_waits_too_long_fails_alone(on_loop, thing):
    async def late():
        return await asyncio.gather(
            thing.call("wait", 60.0, timeout=0.2), thing.call("wait", 0.4, timeout=5.0), return_exceptions=True
        )

    failed, waited = on_loop.run(late())
    assert isinstance(failed, HostedCallFailed) and "took longer than 0.2 seconds" in str(failed) and waited == 1


ENDS = {
    "sleep": "took longer than 0.3 seconds",
    "die": "ended its process, which exited with status 3",
    "close": "ended its process, which",
    "forge": "wrote into the socket of its process: UnpicklingError: a message names ",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_call_that_ends_its_process_fails_and_the_others_are_lost(on_loop, how):
    async def end():
        one, other, waits = [await on_loop.hosts.make(THING, {}, 20.0) for _ in range(3)]
        outcomes = await asyncio.gather(
            one.call("misbehave", how, timeout=0.3), waits.call("wait", 30.0, timeout=60.0), return_exceptions=True
        )
        try:
            await other.call("add", 1, timeout=5.0)
        except HostLost as lost:
            outcomes.append(lost)
        again = await on_loop.hosts.make(THING, {"start": 5}, 20.0)
        value = await again.call("add", 1, timeout=5.0)
        for each in (one, other, waits, again):
            await each.close()
        return outcomes, value

    (guilty, waiting, idle), value = on_loop.run(end())
    assert isinstance(guilty, HostedCallFailed) and ENDS[how] in str(guilty), guilty
    for lost in (waiting, idle):
        assert isinstance(lost, HostLost) and lost.by_another_call
        assert str(lost).startswith(f"a process for tests ended: another call, {THING}.misbehave()")
    assert value == 6


def test_an_async_call_that_holds_the_event_loop_is_the_guilty_one(on_loop):
    async def hold():
        one, other = [await on_loop.hosts.make(THING, {}, 20.0) for _ in range(2)]
        return await asyncio.gather(
            one.call("wait", 30.0, timeout=60.0), other.call("hold_the_loop", timeout=0.3), return_exceptions=True
        )

    lost, guilty = on_loop.run(hold())
    assert isinstance(lost, HostLost) and "took longer than 0.3 seconds" in str(guilty)


def test_the_clock_of_a_call_starts_when_it_does(on_loop):
    async def queue():
        made = [await on_loop.hosts.make(THING, {}, 20.0) for _ in range(4)]
        makes = (on_loop.hosts.make(THING, {"sleeps": 0.15}, 0.4) for _ in range(4))
        made += await asyncio.gather(*makes)
        for each in made:
            await each.close()

    on_loop.run(queue())  # the last one waits for 0.45 s, and then takes 0.15 s


def test_what_cannot_be_made_is_named(on_loop):
    for target, kwargs, message in (
        (THING, {"size": 3}, r"Thing\(\) in a worker process raised TypeError: .*unexpected keyword argument 'size'"),
        (f"{FILE}:Nothing", {}, "has no 'Nothing'"),
        ("no_such_file.py:Thing", {}, "there is no file"),
    ):
        with pytest.raises(HostedCallFailed, match=message):
            on_loop.run(on_loop.hosts.make(target, kwargs, 5.0))


def test_a_closed_object_calls_its_own_close_and_a_failure_of_it_is_logged(on_loop, tmp_path, caplog):
    closed = on_loop.run(on_loop.hosts.make(f"{FILE}:Closes", {"path": str(tmp_path / "said")}, 5.0))
    on_loop.run(closed.close())
    assert (tmp_path / "said").read_text() == "closed\n"
    on_loop.run(on_loop.run(on_loop.hosts.make(f"{FILE}:DoesNotClose", {}, 5.0)).close())
    assert "DoesNotClose.close() in a worker process raised OSError: it is open" in caplog.text


def test_a_call_that_is_no_longer_waited_for_ends_with_its_object(on_loop):
    async def cancel():
        made = await on_loop.hosts.make(THING, {}, 5.0)
        call = asyncio.ensure_future(made.call("wait", 60.0, timeout=120.0))
        (process,) = on_loop.hosts.processes
        await wait_for_calls(process, 1)
        call.cancel()
        await made.close()
        await wait_for_calls(process, 0)

    async def wait_for_calls(process, count):
        async with asyncio.timeout(20):
            while process.num_calls != count:
                await asyncio.sleep(0.001)

    on_loop.run(cancel())


def host_processes():
    return {child.pid for child in children_with("rl_megatron.rollouts.host_child")}


def test_functions_and_objects_are_shared_out_among_processes():
    on_loop, before = HostsOnALoop(2), host_processes()
    try:

        async def share():
            one, other = [await on_loop.hosts.make(THING, {}, 20.0) for _ in range(2)]
            failed = await asyncio.gather(
                one.call("misbehave", "sleep", timeout=0.5), other.call("wait", 0.8, timeout=5.0),
                return_exceptions=True,
            )  # fmt: skip
            calls = [on_loop.hosts.call(f"{FILE}:double", {"number": n}, 5.0) for n in range(50)]
            doubles = await asyncio.gather(*calls)
            await on_loop.hosts.call(f"{FILE}:double_later", {"number": 1}, 5.0)
            began = time.monotonic()
            await asyncio.gather(*(on_loop.hosts.call(f"{FILE}:double_later", {"number": 1}, 5.0) for _ in range(50)))
            seconds = time.monotonic() - began
            return failed, doubles, seconds, host_processes() - before

        (guilty, waited), doubles, seconds, pids = on_loop.run(share())
        assert isinstance(guilty, HostedCallFailed) and waited == 0, "the objects are in two processes"
        assert doubles == [2 * n for n in range(50)] and seconds < 10 * 0.2
        assert len(pids) == 2
    finally:
        on_loop.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_no_process_is_started_before_it_is_needed():
    before = host_processes()
    ProcessHosts(4, HostLimits(), "tests").close()
    assert host_processes() <= before


@pytest.mark.change
def test_objects_can_live_in_another_interpreter_that_has_no_package(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "only_there.py").write_text("NAME = 'only there'\n")
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (tmp_path / "thing.py").write_text(
        "import importlib.util, sys\n"
        "import neighbour, rl_megatron\n"
        "class Thing:\n"
        "    def found(self):\n"
        "        import only_there\n"
        "        has = [importlib.util.find_spec(name) is not None for name in ('torch', 'pydantic')]\n"
        "        return sys.executable, neighbour.NAME, rl_megatron.__file__, has\n"
    )

    async def found():
        hosts = ProcessHosts(1, HostLimits(), "tests", str(python))
        try:
            made = await hosts.make(f"{tmp_path}/thing.py:Thing", {}, 20.0)
            return await made.call("found", timeout=5.0)
        finally:
            hosts.close()

    assert asyncio.run(found()) == (str(python), "neighbour", rl_megatron.__file__, [False, False])
