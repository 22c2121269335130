"""Weights that servers read from a shared directory."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import RefitPlan, TensorSpec, WeightsRefused, plan_buckets
from rl_megatron.weight_sync.weights_on_disk import ADAPTER_FILES, WeightDirectory

SPECS = [TensorSpec("a", (4, 3), "bfloat16"), TensorSpec("b", (5,), "float32"), TensorSpec("c", (2, 2), "bfloat16")]
HERE = f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"  # this machine and its processes
RANKS = Ranks()


class Sender:
    """Stands in for a `WeightSender`, whose weights are all `value`."""

    plan = RefitPlan({"model_type": "llama"}, 10, plan_buckets(SPECS, max_bytes=24))

    def __init__(self, value: float):
        self._value = value

    def stream(self):
        for spec in SPECS:
            yield spec.name, torch.full(spec.shape, self._value, dtype=spec.torch_dtype)


def test_a_version_is_written_with_its_configuration_and_replaces_the_one_before(tmp_path):
    directory = WeightDirectory(tmp_path, RANKS, max_shard_bytes=30)
    first = directory.write("weights-1", Sender(1.0))
    second = directory.write("weights-2", Sender(2.0))
    weights = {}
    for file in second.glob("*.safetensors"):
        weights |= load_file(file)
    assert {name: (tuple(t.shape), t.dtype) for name, t in weights.items()} == {
        spec.name: (spec.shape, spec.torch_dtype) for spec in SPECS
    }
    assert all((weight == 2).all() for weight in weights.values())
    assert (second / "config.json").exists() and first.exists()
    directory.keep_only(second)
    assert second.exists() and not first.exists()
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_an_adapters_files_have_the_names_that_servers_look_for(tmp_path):
    directory = WeightDirectory(tmp_path, RANKS, max_shard_bytes=1 << 20)
    written = directory.write("adapter-1", Sender(1.0), ADAPTER_FILES)
    assert {file.name for file in written.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (load_file(written / "adapter_model.safetensors")["a"] == 1).all()


def test_weights_of_a_killed_process_are_deleted_and_those_of_a_running_one_are_kept(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed, running, other = (
        tmp_path / f"rl-megatron-weights-{name}-x"
        for name in (f"{HERE}-{ended.pid}", f"{HERE}-{os.getppid()}", "elsewhere-1-1")
    )
    for directory in (killed, running, other):
        (directory / "weights-3").mkdir(parents=True)
    WeightDirectory(tmp_path, RANKS, max_shard_bytes=30).write("weights-1", Sender(1.0))
    assert [each.exists() for each in (killed, running, other)] == [False, True, True]


def test_files_that_differ_from_the_weights_get_no_name(tmp_path, monkeypatch):
    from rl_megatron.checkpoint.safetensors_files import WeightWriter

    write = WeightWriter.write
    monkeypatch.setattr(
        WeightWriter, "write", lambda self, name, *at: write(self, name, *at[:2], at[2] * (name != "b"))
    )
    directory = WeightDirectory(tmp_path, RANKS, max_shard_bytes=1 << 20)
    with pytest.raises(WeightsRefused, match="b differs from what was written"):
        directory.write("weights-1", Sender(1.0))
    assert [path.name for path in Path(tmp_path).glob("*/*")] == ["weights-1.partial"]
    directory.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsRefused, match=r"could not be written to .*/file: "):
        WeightDirectory(tmp_path / "file", RANKS, 1 << 20).write("weights-1", Sender(1.0))
