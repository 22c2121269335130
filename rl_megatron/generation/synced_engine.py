"""`SyncedEngine`: a rollout engine that syncs weights and checks logprobs before it generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rl_megatron.generation.interfaces import Completion, EngineFailed, Request, RolloutEngine, Served
from rl_megatron.generation.logprob_check import LogprobCheck
from rl_megatron.timing import count_tokens, phase
from rl_megatron.topology.ranks import Ranks


class SyncedEngine:
    """A `RolloutEngine` that wraps another engine, which it owns.

    It generates only with the policy's current weights, after comparing the engine's logprobs with the trainer's. The
    comparison is made once for each copy of the weights that the engine serves.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        check: LogprobCheck,
        ranks: Ranks,
        note: Callable[[dict[str, float]], None],
        needs_routing: bool = False,
    ):
        """Wrap an engine. `note` is called with the metrics of every weight sync and of every logprob check.

        `needs_routing` means that completions must have routed experts, for router replay.
        """
        self._engine, self._check, self._ranks, self._note = engine, check, ranks, note
        self._needs_routing = needs_routing
        self._checked: Served | None = None
        self._before_sync: Callable[[], None] = _do_nothing
        self._after_sync: Callable[[], None] = _do_nothing

    def observe_syncs(self, before_sync: Callable[[], None], after_sync: Callable[[], None]) -> None:
        """Call these functions before and after every weight sync, on every rank."""
        self._before_sync, self._after_sync = before_sync, after_sync

    @property
    def served(self) -> Served | None:
        """Return the copy of the policy's weights that the engine serves, or None if it serves none."""
        return self._engine.served

    def sync(self) -> dict[str, float]:
        """Sync the policy's current weights to the engine, and return the metrics of the sync."""
        self._before_sync()
        with phase("refit"):
            metrics = self._engine.sync()
        self._after_sync()
        self._note(metrics)
        return metrics

    async def submit(self, request: Request) -> Completion:
        """Complete a single request on rank 0, with whatever weights the engine has; see `RolloutEngine`.

        Raises:
            EngineLost: The engine has ended, and the next sync starts it again.
            EngineFailed: The completion lacks routed experts that `needs_routing` requires, or the engine takes no
                single requests.
        """
        submit = getattr(self._engine, "submit", None)
        if submit is None:
            raise EngineFailed(
                "the rollout engine takes no single requests while the policy trains: it has no method `submit`; set "
                "rollout.async_enabled=false"
            )
        completion = await submit(request)
        self._require_routing(completion.routed_experts is not None)
        return completion

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete requests, as `RolloutEngine.complete`, with the policy's current weights.

        Raises:
            EngineMismatch: The engine's logprobs differ from the trainer's. Nothing was generated for the caller.
            EngineFailed: The completions lack routed experts that `needs_routing` requires.
        """
        beginnings = self._check.choose([self._shorten(request) for request in requests])
        prompts = self._ranks.share(lambda: beginnings)
        while True:
            served = self.prepare(prompts)
            with phase("generate"):
                completions = self._engine.complete(requests)
                num_tokens, has_routing = self._ranks.share(partial(_summarise, completions))
                count_tokens(num_tokens)
                self._require_routing(has_routing)
            if self.served == served:
                return completions  # otherwise they come from a restarted engine, which has not been checked

    def prepare(self, prompts: list[list[int]]) -> Served:
        """Sync the policy's current weights, check logprobs on the prompts, and return the copy that the engine serves.

        Raises:
            EngineMismatch: The engine's logprobs differ from the trainer's.
        """
        while True:
            self.sync()
            served = self.served
            if served is None:
                raise EngineFailed("the rollout engine serves no weights after sync()")
            if served == self._checked:
                return served
            with phase("gate"):
                self._note(self._check.run(self._engine, prompts))
            self._checked = served  # if the engine restarted during the check, the check is repeated

    def _shorten(self, request: Request) -> list[int]:
        """Return the prompt, shortened if needed so that the logprob check's completion fits after it."""
        length = len(request.prompt) + min(0, request.sampling.max_new_tokens - self._check.max_new_tokens)
        return list(request.prompt[: max(1, length)])

    def _require_routing(self, has_routing: bool) -> None:
        if self._needs_routing and not has_routing:
            raise EngineFailed(
                "no routed experts came with the completions, but generation.router_replay=true needs them; set "
                "router_replay=false, or use another engine"
            )

    def sleep(self) -> None:
        """Let the engine release memory that the policy needs for training, if both share devices."""
        sleep = getattr(self._engine, "sleep", None)
        if sleep is not None:
            with phase("sleep"):
                sleep()

    def close(self) -> None:
        self._engine.close()


def _summarise(completions: Sequence[Completion]) -> tuple[int, bool]:
    """Return the number of sampled tokens, and whether all completions have routed experts."""
    num_tokens = sum(len(completion.ids) for completion in completions)
    return num_tokens, all(completion.routed_experts is not None for completion in completions)


def _do_nothing() -> None:
    """Do nothing about a weight sync."""
