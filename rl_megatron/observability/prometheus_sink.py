"""`PrometheusSink`: the newest value of every metric at an address that Prometheus reads."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loggers import PrometheusConfig
from rl_megatron.observability.sinks import MetricLine

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_OWN = ("step", "phase", "restarts")  # names that are no metrics of lines
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # a variable of the launcher


class PrometheusSink:
    """A web server in a thread of this process, with `rl_megatron_<metric>{run, stage, kind}`.

    Besides the metrics of lines it has `rl_megatron_step`, `rl_megatron_phase` (1 for the phase that runs, 0 for those
    that ran before) and `rl_megatron_restarts`.
    """

    def __init__(self, settings: PrometheusConfig, output_dir: Path):
        """Start to listen at the address.

        Raises:
            ConfigError: The address is in use, or not of this machine.
        """
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._gauge = Gauge
        self._registry, self._gauges = CollectorRegistry(), {}
        self._run, self._stage, self._phases = output_dir.resolve().name, "", set()
        try:
            self._server, self._thread = start_http_server(settings.port, addr=settings.host, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"logger.prometheus.host={settings.host} and logger.prometheus.port={settings.port}: the endpoint "
                f"cannot listen there ({error.strerror}); choose another port, or end what uses it"
            ) from error
        self._set("restarts", int(os.environ.get(_RESTARTS, "0")))

    @property
    def port(self) -> int:
        """Return the port at which it listens."""
        return self._server.server_port

    def begin_stage(self, stage: str, start: int) -> None:
        """Show the stage's first step."""
        self._stage = stage
        self._set("step", start, stage=stage)

    def enter_phase(self, phase: str | None) -> None:
        """Show which phase runs; None between phases."""
        if phase is not None:
            self._phases.add(phase)
        for name in self._phases:
            self._set("phase", float(name == phase), phase=name)

    def write(self, line: MetricLine) -> None:
        """Show the values of the line."""
        if line.kind == "train":
            self._set("step", line.step, stage=line.stage)
        for name, value in line.metrics.items():
            own = f"{name}_metric" if name in _OWN else name
            self._set(own, value, stage=line.stage, kind=line.kind)

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, value: float, **labels: str) -> None:
        full = f"rl_megatron_{_NOT_IN_NAMES.sub('_', name)}"
        if full not in self._gauges:
            self._gauges[full] = self._gauge(full, name, ["run", *labels], registry=self._registry)
        self._gauges[full].labels(run=self._run, **labels).set(value)
