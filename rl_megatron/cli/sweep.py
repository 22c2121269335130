"""Run one job for each combination of the values of a sweep, one after the other: `rl-megatron train --multirun`.

Each job is a process of its own, because megatron-core has global state and a job may crash. The jobs are forks of a
server process, which does the imports once. Under torchrun, every rank expands the sweep into the same jobs, and the
ranks of a job meet in the launcher's store under the job's own name.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rl_megatron import log
from rl_megatron.config.commands import format_command, format_override
from rl_megatron.config.errors import STOPPED, ConfigError
from rl_megatron.config.loading.compose import hydra_session
from rl_megatron.config.loading.hints import explain, get_override_key
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.schema import RunConfig
from rl_megatron.runs.stop_signals import SIGNALS
from rl_megatron.topology.job_store import JOB, TIMEOUT_MINUTES, open_attempt_store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LONGEST_NAME = 120  # characters of a directory's name
_LONGEST_WORDS = 30  # characters that are kept of a value that cannot be part of a name
_END_SECONDS = 30.0  # for the other ranks to end a job after it has failed on one rank
_POLL_SECONDS = 0.2
_STOPPED = (STOPPED, *(128 + number for number in SIGNALS))  # the exit statuses of a job that a signal ended


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        name: Its swept overrides, as the name of a directory.
        overrides: All its overrides, including output_dir.
    """

    name: str
    overrides: list[str]
    config: RunConfig


def expand_sweep(overrides: list[str], config_dir: str | None, config_name: str) -> list[Job]:
    """Return the jobs of a sweep, in Hydra's order: the values of the last override change fastest."""
    jobs = {}
    for job_overrides, swept in _combine(overrides, config_dir):
        name = _name_directory([override for override in swept if get_override_key(override) != "output_dir"])
        config = load_config(job_overrides, config_dir, config_name)
        output_dir = f"{config.output_dir}/{name}" if name else config.output_dir
        others = [override for override in job_overrides if get_override_key(override) != "output_dir"]
        job = Job(
            name or output_dir,
            [*others, format_override("output_dir", output_dir)],
            replace(config, output_dir=output_dir),
        )
        jobs.setdefault(output_dir, job)
    return list(jobs.values())


def run_jobs(jobs: list[Job], options: list[str], run: Callable[[list[str]], int]) -> int:
    """Run all jobs, report those that failed, and return the exit status: 0 if none failed.

    A signal that ends a job early also ends the sweep. The same command continues with that job.

    Args:
        jobs: The jobs.
        options: Command-line options of every job, such as --config-dir.
        run: A module-level function that runs a command, and returns its exit status.
    """
    store, results = _open_store(), []
    for number, job in enumerate(jobs):
        log.LOGGER.info("job %d of %d: %s, in %s", number + 1, len(jobs), job.name, job.config.output_dir)
        arguments = ["train", *job.overrides, *options]
        results.append(_wait_for_job(_start(run, arguments, number), number, store))
        if results[-1] in _STOPPED:
            break
    if log.is_main_rank():
        _report(jobs, results)
    if store is not None:
        _leave(store)
    return results[-1] if results[-1] in _STOPPED else max(results)


def _combine(overrides: list[str], config_dir: str | None) -> list[tuple[list[str], list[str]]]:
    """Return, for each job, all its overrides, and those of them that the sweep varies."""
    choices: dict[str, list[str]] = {}
    swept: set[str] = set()
    with hydra_session(config_dir) as hydra:
        parser, state = OverridesParser.create(config_loader=hydra.config_loader), random.getstate()
        random.seed(0)  # so that shuffle(…) gives every rank the same order
        try:
            for override in overrides:
                (parsed,) = parser.parse_overrides([override])
                key = parsed.get_key_element()
                swept.discard(key)
                choices.pop(key, None)
                if not parsed.is_sweep_override():
                    choices[key] = [override]
                    continue
                if not parsed.is_discrete_sweep():
                    raise ConfigError(f"override {override!r}: a sweep needs single values; write them, or range(…)")
                choices[key] = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
                swept.add(key)
        except HydraException as error:
            raise ConfigError(explain(error, overrides, {})) from error
        finally:
            random.setstate(state)
    jobs = [list(job) for job in itertools.product(*choices.values())]
    return [(job, [override for key, override in zip(choices, job, strict=True) if key in swept]) for job in jobs]


def _name_directory(swept: list[str]) -> str:
    """Return the name of a job's directory: its swept overrides.

    A value that cannot be part of a name, such as a template, is replaced by its words and a digest.
    """
    overrides = [override.lstrip("+") for override in swept]
    name = ",".join(map(_shorten_value, overrides))
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{_hash(','.join(overrides))}"


def _shorten_value(override: str) -> str:
    key, _, value = override.partition("=")
    if re.fullmatch(r"[\w.,=+@%-]*", value):
        return override
    words = re.sub(r"[^\w.]+", "-", value.replace("\\n", " ")).strip("-.")[:_LONGEST_WORDS].rstrip("-.")
    return f"{key}={words}-{_hash(value)}" if words else f"{key}={_hash(value)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _start(run: Callable[[list[str]], int], arguments: list[str], number: int) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_megatron.runs.run"])
    environment = {**os.environ, JOB: f"job-{number}"}
    if "RANK" in environment:
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store exists already: see _open_store
    process = context.Process(target=_run_in_process, args=(run, arguments, environment))
    process.start()
    return process


def _run_in_process(run: Callable[[list[str]], int], arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(run(arguments))


def _open_store() -> Store | None:
    """Return the store in which the ranks meet: the launcher's, or one that rank 0 opens. None without torchrun."""
    if "RANK" not in os.environ:
        return None
    import torch.distributed as dist  # slow to import

    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = log.is_main_rank() and not launcher_has_store
    tcp_store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, not re-exported
    store = tcp_store(address, port, is_master=is_master, wait_for_workers=False)
    if not launcher_has_store:
        return store
    timeout = timedelta(minutes=TIMEOUT_MINUTES)
    return open_attempt_store(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)


def _wait_for_job(process: BaseProcess, number: int, store: Store | None) -> int:
    """Wait until a job has ended on all ranks, and return the highest exit status; a rank that was killed has 1.

    Meanwhile this process forwards stop signals to the job. A rank that such a signal ended has 128 + its number.
    """

    def forward(signum: int, frame: FrameType | None) -> None:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signum)

    handlers = {signum: signal.signal(signum, forward) for signum in SIGNALS}
    deadline, failed = None, f"sweep/{number}/failed"
    try:
        while process.is_alive():
            process.join(_POLL_SECONDS)
            if store is not None and deadline is None and store.check([failed]):
                deadline = time.monotonic() + _END_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                process.kill()
        status = process.exitcode or 0
        if status < 0:
            status = 128 - status if -status in SIGNALS else 1
        return status if store is None else _wait_for_all_statuses(status, number, store)
    finally:
        process.terminate()
        process.join()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _wait_for_all_statuses(status: int, number: int, store: Store) -> int:
    """Wait until all ranks of a job have ended, and return the highest exit status."""
    failed, ended = f"sweep/{number}/failed", f"sweep/{number}/ended"
    if status:
        store.set(failed, str(status))
    store.add(ended, 1)
    _wait_for_all(ended, store)
    return max(status, int(store.get(failed))) if store.check([failed]) else status


def _leave(store: Store) -> None:
    """Report to the other ranks that this rank no longer uses the store. Rank 0 may own it, so rank 0 leaves last."""
    store.add("sweep/left", 1)
    if log.is_main_rank():
        _wait_for_all("sweep/left", store)


def _wait_for_all(counter: str, store: Store) -> None:
    while store.add(counter, 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(_POLL_SECONDS)


def _report(jobs: list[Job], results: list[int]) -> None:
    """Print the result and the output directory of each job."""
    states = ["complete" if status == 0 else f"failed with status {status}" for status in results]
    if results[-1] in _STOPPED:
        states[-1] = "ended early"
    states += ["not begun"] * (len(jobs) - len(states))
    width = max(map(len, states))
    lines = (f"  {state:{width}}  {job.config.output_dir}" for job, state in zip(jobs, states, strict=True))
    print(f"Sweep of {len(jobs)} jobs:", *lines, sep="\n", flush=True)
    complete = [job.config.output_dir for job, status in zip(jobs, results, strict=False) if status == 0]
    if complete:
        print("", "What you can do next:", "  List the checkpoints of a job:", sep="\n")
        print(f"    {format_command('inspect', complete[-1])}", flush=True)
