"""`MegatronTimers`: the object that megatron-core tells about its work, which becomes phases of the timer in use."""

from __future__ import annotations

from rl_megatron.timing import Path, PhaseTimer, timer_in_use

_PHASES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "collectives",
    "params-all-gather": "collectives",
    "embedding-grads-all-reduce": "collectives",
    "non-tensor-parallel-grads-all-reduce": "collectives",
}
_BETWEEN_STAGES = ("-recv", "-send")  # at the end of the names of what pipeline stages wait for


class MegatronTimers:
    """The attribute `timers` of a megatron-core configuration: `timers(name, log_level=2).start()`, and `.stop()`."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[PhaseTimer, Path]] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Named:
        """Return what times one kind of work. Every level is timed."""
        return _Named(self._running, name)


class _Named:
    def __init__(self, running: dict[str, tuple[PhaseTimer, Path]], name: str):
        self._running, self._name = running, name

    def start(self, barrier: bool = False) -> None:
        """Begin the phase, if a timer is in use and knows this work. There is never a barrier."""
        timer, name = timer_in_use(), self._name
        phase = "pipeline_wait" if name.endswith(_BETWEEN_STAGES) else _PHASES.get(name)
        if timer is not None and phase is not None:
            self._running[name] = (timer, timer.begin(phase))

    def stop(self, barrier: bool = False) -> None:
        """End the phase, if it was begun."""
        timer, outer = self._running.pop(self._name, (None, ()))
        if timer is not None:
            timer.end(outer)


MEGATRON_TIMERS = MegatronTimers()
