"""Generate with Hugging Face models in separate processes, which receive weights instead of reading files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.generation.completion_batch import check_requests
from rl_megatron.generation.interfaces import Completion, EngineFailed, EngineLost, Request, Served
from rl_megatron.generation.transformers.devices import choose_engine_devices
from rl_megatron.generation.transformers.process import Answers, EngineDied, EngineWorkers
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.exporter import AdapterExporter, BaseExporter
from rl_megatron.weight_sync.process_group import CollectiveFailed, find_free_address
from rl_megatron.weight_sync.sender import PendingGroup, WeightSender

_T = TypeVar("_T")
_JOINING_POLL_SECONDS = 0.1
_SECONDS_AFTER_A_BREAK = 5.0  # how long engines may take to report a collective that failed


class TransformersEngine:
    """A `RolloutEngine` in `generation.num_engines` processes, which the policy's rank 0 starts at the first sync.

    Only rank 0 talks to the processes. It broadcasts their answers, so that all ranks act alike. All ranks take part
    when weights are sent over a collective. If a process dies, all engines are ended and restarted, because they share
    a process group. The new engines get the same weights and requests, so the result is the same.

    With `generation.refit=adapter` the engines get the base weights when they start. A weight sync then sends the
    adapter alone.
    """

    def __init__(self, policy: MegatronPolicy, settings: GenerationConfig, collective_timeout_minutes: float = 10.0):
        self.policy, self.settings = policy, settings
        self._timeout = 60 * collective_timeout_minutes
        topology = policy.topology
        self._ranks = topology.ranks
        self._sends_adapter = settings.refit == "adapter"
        self._sender = WeightSender(policy.model, AdapterExporter) if self._sends_adapter else policy.weights
        self._workers: EngineWorkers | None = None  # on rank 0
        self._started = False
        self._served: Served | None = None
        self._starts = self._restarts = 0
        self._sync_metrics: dict[str, float] = {}  # of a weight sync that was not reported yet
        self._devices = choose_engine_devices(settings, policy.topology.device)

    @property
    def served(self) -> Served | None:
        """Return the copy of the weights that all engines serve, or None if they serve none."""
        return self._served

    def sync(self) -> dict[str, float]:
        """Send the policy's current weights to the engines; see `RolloutEngine.sync`.

        Raises:
            WeightsRefused: On every rank, if the weights that arrived are not those that were sent.
            EngineFailed: On every rank, if engines die more often than `generation.max_engine_restarts`.
        """
        if self._ranks.share(self._has_lost_a_process):  # an engine that decoded single requests may have ended
            self._served = None
        if self._served is None or self._served.version != self.policy.weight_version:
            self._served = None
            self._run_with_restarts(self._sync_weights)
        metrics, self._sync_metrics = self._sync_metrics, {}
        return metrics

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete the requests of rank 0 together; see `RolloutEngine.complete`."""
        self.policy.model.require_head("lm", "generate")
        longest = self.policy.model_config.max_sequence_length
        self._ranks.run_on_rank0(lambda: check_requests(requests, longest, self.policy.vocab_size), (ConfigError,))
        if self._served is None:
            raise EngineFailed("the rollout engine serves no weights; call sync() first")
        answers = self._run_with_restarts(lambda: self._ask_for_completions(list(requests)))
        completions = [completion for answer in answers for completion in answer]
        self._ranks.run_on_rank0(lambda: self._check_versions(completions), (EngineFailed,))
        return completions

    def _check_versions(self, completions: Sequence[Completion]) -> None:
        for version in {span.version for completion in completions for span in completion.versions}:
            if version != self.policy.weight_version:
                raise EngineFailed(
                    f"the rollout engine answered with version {version} of the weights, but the policy's is "
                    f"{self.policy.weight_version}; call sync() first"
                )

    async def submit(self, request: Request) -> Completion:
        """Return the completion of one request on rank 0; see `RolloutEngine`.

        Engines decode single requests between the calls that all ranks make: `sync` and `complete` interrupt these
        requests, which continue afterwards.

        Raises:
            ConfigError: The prompt is too long for `max_new_tokens`.
            EngineFailed: The engine raised an exception.
            EngineLost: The engine's process ended. After `sync` has started it again, the request may be repeated.
            ValueError: Another request that has no completion yet has this id.
        """
        if self._served is None:
            raise EngineLost("the rollout engine serves no weights; call sync() first")
        check_requests([request], self.policy.model_config.max_sequence_length, self.policy.vocab_size)
        single_requests = self._get_engines().requests
        try:
            return await asyncio.wrap_future(single_requests.put(request))
        except asyncio.CancelledError:
            single_requests.abort(request.request_id)
            raise

    def close(self) -> None:
        self._leave(at_once=False)
        if self._sends_adapter:
            self._sender.close()

    # --- requests, which are repeated if an engine dies ---

    def _has_lost_a_process(self) -> bool:
        return self._workers is not None and self._workers.requests.has_lost_a_process

    def _run_with_restarts(self, attempt: Callable[[], _T]) -> _T:
        """Return what `attempt` returns. If an engine dies meanwhile, end all engines and try again."""
        while True:
            try:
                return attempt()
            except EngineDied as death:
                self._leave(at_once=True)
                self._restarts += 1
                allowed = self.settings.max_engine_restarts
                if self._restarts > allowed:
                    raise EngineFailed(
                        f"{death}; generation.max_engine_restarts={allowed} does not allow another restart"
                    ) from death
                log.LOGGER.warning(
                    "%s; starting the engines again (%d of at most %d times)", death, self._restarts, allowed
                )

    def _ask_for_completions(self, requests: list[Request]) -> tuple[list[Completion], ...]:
        """Return on rank 0 the answer of each engine that got requests; return nothing on other ranks."""
        if self._served is None:  # the engines of the last attempt died
            self._sync_weights()
        parts = max(1, min(self.settings.num_engines, len(requests)))
        edges = [len(requests) * part // parts for part in range(parts + 1)]
        shares = [(requests[a:b],) for a, b in zip(edges, edges[1:], strict=False)]
        return self._ask("generate", shares, to_all=False)

    def _sync_weights(self) -> None:
        """Start the engines if needed, and send them the policy's current weights.

        It keeps the metrics for `sync`: those of the `WeightSender`, the time until the last engine serves the weights,
        and the times of the engines' phases `verify` and `copy`.
        """
        if not self._started:
            self._start()
        began, version = time.perf_counter(), self.policy.weight_version
        if self.settings.refit == "collective":
            at_engines = self._send_over_group(version)
        else:
            at_engines = self._send_in_shared_memory(self._sender, version)
            if self._sends_adapter:  # training releases only the memory of `policy.weights`
                self._sender.release()
        slowest = {phase: max(seconds[phase] for seconds in at_engines) for phase in at_engines[0]}
        metrics = self._sender.timings.metrics(time.perf_counter() - began, slowest)
        self._served, self._sync_metrics = Served(version, self._starts), metrics

    def _send_over_group(self, version: int) -> tuple[dict[str, float], ...]:
        def send() -> None:
            for handle in self.policy.broadcast_weights_for_collective():
                handle.wait()

        return self._ask("receive", [(version,)] * self.settings.num_engines, meanwhile=send)

    def _send_in_shared_memory(self, sender: WeightSender, version: int) -> tuple[dict[str, float], ...]:
        everyone = self.settings.num_engines
        self._ask("begin", [(version,)] * everyone)
        for keys in sender.list_key_groups():
            (handle,) = sender.share(keys).values()  # engines open the handle of rank 0
            self._ask("take", [(handle,)] * everyone)
        return self._ask("finish", [()] * everyone)

    # --- processes ---

    def _start(self) -> None:
        first = WeightSender(self.policy.model, BaseExporter) if self._sends_adapter else self._sender
        max_bytes = int(self.settings.refit_bucket_mb * (1 << 20))
        first.list_key_groups(max_bytes)
        plan, settings = first.plan, self.settings
        self._started = True
        self._starts += 1
        if self._ranks.leads:
            self._workers = EngineWorkers(self.settings.num_engines, 60 * self.settings.engine_timeout_minutes)
        self._ask("build", [(plan, device, settings.batch_size, settings.router_replay) for device in self._devices])
        if self.settings.refit == "collective":
            self._join()
        if self._sends_adapter:
            try:
                self._send_in_shared_memory(first, self.policy.weight_version)
            finally:
                first.close()
            self._sender.list_key_groups(max_bytes)
            self._ask("add_adapter", [(self._sender.plan,)] * len(self._devices))

    def _join(self) -> None:
        """Join policy and engines in one process group, the policy's ranks first."""
        num_ranks = self.policy.topology.world_size
        address = self._ranks.share(find_free_address)
        common = (num_ranks + len(self._devices), self._timeout, self.policy.topology.device.type)
        handles = self.policy.init_collective(*address, num_ranks + len(self._devices), self._timeout)
        arguments = [(*address, num_ranks + index, *common) for index in range(len(self._devices))]
        self._ask("join", arguments, meanwhile=lambda: self._meet(handles))

    def _meet(self, handles: Sequence[PendingGroup]) -> None:
        """Wait until all of the policy's ranks have joined; raise CollectiveFailed on every rank if one cannot join.

        Ranks exchange their states, so that none waits for a rank that cannot join (for example because its port is
        in use), or for an engine that ended.
        """
        joined: tuple[bool, ...] = (False,)
        while not all(joined):
            over, failure = all(handle.is_over(_JOINING_POLL_SECONDS) for handle in handles), None
            try:
                if over:
                    for handle in handles:
                        handle.wait()
                elif self._ranks.leads:
                    answers = self._get_engines().collect_answers(_JOINING_POLL_SECONDS)
                    failure = answers and answers.failure
            except CollectiveFailed as error:
                failure = str(error)
            states = self._ranks.gather((over, failure))
            failures = [failure for _, failure in states if failure is not None]
            if failures:
                raise CollectiveFailed(failures[0])
            joined = tuple(over for over, _ in states)

    def _get_engines(self) -> EngineWorkers:
        """Return the running engines, on rank 0; raise EngineLost if none runs, or on another rank."""
        if self._workers is None:
            raise EngineLost("no rollout engine runs here: rank 0 of the policy starts them at the first weight sync")
        return self._workers

    def _leave(self, at_once: bool) -> None:
        self._served, self._started = None, False
        if self._workers is not None:
            self._workers.shutdown(at_once)
            self._workers = None

    def _ask(
        self,
        method: str,
        arguments: Sequence[tuple[object, ...]],
        meanwhile: Callable[[], None] | None = None,
        to_all: bool = True,
    ) -> tuple[Any, ...]:
        """Call a method of the engines' workers, and return their answers.

        `arguments` has one tuple for each engine that is called. All ranks call `meanwhile` while the engines work on
        the answers. Every rank gets the answers; if `to_all` is False, only rank 0.

        Raises:
            EngineDied: On every rank, if an engine's process ended or was too slow, or a collective failed for a reason
                that no engine reports.
            EngineFailed: On every rank, if an engine raised an exception, which would recur after a restart.
            WeightsRefused: On every rank, if the weights that arrived are not those that were sent.
        """
        if self._ranks.leads:
            self._get_engines().ask(method, *arguments)
        broken = None
        if meanwhile is not None:
            try:
                meanwhile()
            except CollectiveFailed as error:
                broken = str(error)
            broken = self._ranks.find_first_failure(broken)
        if broken is not None and self._ranks.leads:
            self._get_engines().hurry(_SECONDS_AFTER_A_BREAK, "a collective failed")
        answers = self._share_answers(to_all)
        if answers.died is not None:
            raise EngineDied(answers.died)
        if answers.failed is not None:
            raise EngineFailed(answers.failed)
        broken = broken or answers.broken
        if broken is not None:
            raise EngineDied(f"the connection between the policy and the engines failed: {broken}")
        if answers.refused is not None:
            raise WeightsRefused(answers.refused)
        return answers.values

    def _share_answers(self, to_all: bool) -> Answers:
        """Return the engines' answers on every rank. If `to_all` is False, ranks other than 0 get only the failure.

        The other ranks wait in a broadcast. An engine may need longer than a collective's timeout, so rank 0 broadcasts
        before the timeout that there is no answer yet, and all wait again.
        """
        on_rank0: tuple[object, ...] = ()

        def collect() -> Answers | None:
            nonlocal on_rank0
            answers = self._get_engines().collect_answers(self._timeout / 4)
            if answers is None or to_all:
                return answers
            on_rank0 = answers.values
            return replace(answers, values=())

        answers = None
        while answers is None:
            answers = self._ranks.share(collect)
        return answers if to_all else replace(answers, values=on_rank0)
