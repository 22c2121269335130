"""The endpoint for Prometheus: the newest values, the phase, and an address that is in use."""

import urllib.request

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loggers import PrometheusConfig
from rl_megatron.observability.service_sinks import PrometheusSink
from rl_megatron.observability.sinks import MetricLine


@pytest.fixture
def sink(tmp_path):
    found = PrometheusSink(PrometheusConfig(port=0), tmp_path / "maths")
    yield found
    found.close()


def values(sink):
    text = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10).read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_the_newest_value_of_every_metric_is_shown(sink):
    sink.begin_stage("sft", 3)
    assert values(sink)['rl_megatron_step{run="maths",stage="sft"}'] == "3.0"
    for step in (4, 5):
        sink.write(MetricLine("sft", step, "train", {"loss": 1 / step, "pass@2": 0.5}, 1.0))
    sink.write(MetricLine("sft", 5, "eval", {"loss": 7.0}, 1.0))
    found = values(sink)
    assert found['rl_megatron_step{run="maths",stage="sft"}'] == "5.0"
    assert found['rl_megatron_loss{kind="train",run="maths",stage="sft"}'] == "0.2"
    assert found['rl_megatron_loss{kind="eval",run="maths",stage="sft"}'] == "7.0"
    assert found['rl_megatron_pass_2{kind="train",run="maths",stage="sft"}'] == "0.5"
    assert found['rl_megatron_restarts{run="maths"}'] == "0.0"


def test_metrics_whose_names_become_equal_share_a_gauge_and_a_metric_may_have_an_own_name(sink):
    sink.begin_stage("sft", 0)
    sink.write(MetricLine("sft", 1, "train", {"a.b": 1.0, "a_b": 2.0, "phase": 3.0}, 1.0))
    found = values(sink)
    assert found['rl_megatron_a_b{kind="train",run="maths",stage="sft"}'] == "2.0"
    assert found['rl_megatron_phase_metric{kind="train",run="maths",stage="sft"}'] == "3.0"


def test_one_phase_runs(sink):
    for phase in ("generate", None, "train"):
        sink.enter_phase(phase)
    found = values(sink)
    assert found['rl_megatron_phase{phase="generate",run="maths"}'] == "0.0"
    assert found['rl_megatron_phase{phase="train",run="maths"}'] == "1.0"


def test_a_port_that_is_in_use_is_refused(sink, tmp_path):
    with pytest.raises(ConfigError, match=rf"logger.prometheus.port={sink.port}: .*choose another port"):
        PrometheusSink(PrometheusConfig(port=sink.port), tmp_path)
