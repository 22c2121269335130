"""Saving: a checkpoint is the state at its step, even if training continues meanwhile; a failure reaches all ranks."""

from __future__ import annotations

import errno
import json
import random
import threading
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from rl_megatron.checkpoint import save as saving
from rl_megatron.checkpoint.directory import Damaged, find_checkpoints
from rl_megatron.checkpoint.exports import Exporter
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.losses import NLLLoss
from rl_megatron.topology.ranks import Ranks
from tests.full_disk import files_of_at_most
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, OPTIMIZER, build_policy, weights
from tests.parallel.test_layouts import random_batch


def train(policy, seed):
    return policy.train(random_batch(8, 16, seed), NLLLoss(), gbs=8)


def tensors_on_disk(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix in (".distcp", ".pt")}


def save_while_training(directory: str, distributed: bool, precision: str) -> None:
    """Save a checkpoint in the foreground, and one in the background that is written after two more steps.

    Check that both have the same tensors, and that saving did not change the training.
    """
    optimizer = DISTRIBUTED_OPTIMIZER if distributed else OPTIMIZER
    policy = build_policy({}, optimizer=optimizer, precision=precision)
    train(policy, 0)
    foreground = policy.save_checkpoint(Path(directory) / "foreground", 1)
    training_continued = threading.Event()

    class Waiting(threading.Thread):
        def run(self) -> None:
            training_continued.wait()
            super().run()

    with patch.object(threading, "Thread", Waiting):
        save = policy.begin_checkpoint(Path(directory) / "background", 1)
    assert not save.is_written()
    assert not find_checkpoints(Path(directory) / "background")
    train(policy, 1), train(policy, 2)
    training_continued.set()
    background = save.finish()
    assert tensors_on_disk(background) == tensors_on_disk(foreground)
    assert any(name.endswith(".distcp") for name in tensors_on_disk(background))
    untouched = build_policy({}, optimizer=optimizer, precision=precision)
    for seed in range(3):
        train(untouched, seed)
    expected, found = weights(untouched), weights(policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_save_in_the_background_holds_the_state_at_its_step_bit_for_bit(ranks, tmp_path, distributed, precision):
    ranks.run(2, save_while_training, str(tmp_path), distributed, precision)


def fill_the_disk(directory: str) -> list[str]:
    """Return the messages of saves that fail in rank 1's part, in rank 0's tensors, and in rank 0's metadata."""
    policy, where, messages = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER), Path(directory), []
    rank = torch.distributed.get_rank()
    first = policy.save_checkpoint(where, 1)
    train(policy, 0)

    def limited_on(limited: int, size: int):
        return files_of_at_most(size) if rank == limited else nullcontext()

    for limited, limit in ((1, 1000), (0, 50_000)):
        with limited_on(limited, limit), pytest.raises(SaveFailed) as error:
            policy.begin_checkpoint(where, 2).finish()
        messages.append(str(error.value))
    save = policy.begin_checkpoint(where, 2)
    while not save.is_written():
        pass
    with limited_on(0, 1000), pytest.raises(SaveFailed) as error:
        save.finish()
    messages.append(str(error.value))
    assert [path.name for path in where.iterdir()] == [first.name], "files of a failed save were left"
    policy.load_checkpoint(first)
    train(policy, 0)
    assert policy.load_checkpoint(policy.save_checkpoint(where, 2))["step"] == 2
    return messages


def test_a_full_disk_fails_the_save_on_every_rank_and_keeps_the_last_checkpoint(ranks, tmp_path):
    """Rank 1 is a replica and writes no tensor here; its random states alone exceed the limit."""
    by_rank = ranks.run(2, fill_the_disk, str(tmp_path))
    assert by_rank[0] == by_rank[1]
    in_a_part, in_the_tensors, in_the_metadata = by_rank[0]
    for message in (in_a_part, in_the_tensors, in_the_metadata):
        assert "step-000002 could not be saved: OSError: [Errno 27] File too large" in message
        assert "bytes free of" in message
    assert "(on rank 1)" in in_a_part and "(on rank" not in in_the_metadata


def lose_the_file_system(directory: str) -> tuple[str, list[str]]:
    """Save while rank 1's file system is gone, so that even its free space cannot be read.

    Returns:
        The message, and the names of the checkpoints that are left.
    """
    policy, gone = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER), OSError(errno.ESTALE, "Stale file handle")
    policy.save_checkpoint(directory, 1)
    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == 1:
            patched.setattr(Path, "write_bytes", Mock(side_effect=gone))
            patched.setattr(saving.shutil, "disk_usage", Mock(side_effect=gone))
        with pytest.raises(SaveFailed) as error:
            policy.save_checkpoint(directory, 2)
    return str(error.value), sorted(path.name for path in Path(directory).iterdir())


def test_a_file_system_that_is_gone_fails_the_save_on_every_rank(ranks, tmp_path):
    for message, left in ranks.run(2, lose_the_file_system, str(tmp_path)):
        assert "Stale file handle; its file system does not answer (on rank 1)" in message
        assert left == ["step-000001"]


def save_below_a_file(directory: str) -> str:
    policy = build_policy({})
    with pytest.raises(SaveFailed) as error:
        policy.save_checkpoint(directory, 1)
    return str(error.value)


def test_a_directory_that_cannot_be_made_is_named_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    messages = ranks.run(2, save_below_a_file, str(tmp_path / "file" / "checkpoints"))
    assert messages[0] == messages[1] and "NotADirectoryError" in messages[0]


def flip_bits(directory: str) -> dict[str, str]:
    """Flip one bit of each file of a checkpoint in turn; return file name → message of loading it."""
    policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER)
    path = policy.save_checkpoint(directory, 1, config="train: {}\n")
    before, messages, generator = weights(policy), {}, random.Random(0)
    for file in sorted(path.iterdir()):
        whole, place, bit = file.read_bytes(), generator.randrange(file.stat().st_size), generator.randrange(8)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        torch.distributed.barrier()
        with pytest.raises(Damaged) as error:
            policy.load_checkpoint(path)
        messages[file.name] = str(error.value)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            file.write_bytes(whole)
    torch.distributed.barrier()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(policy).items())
    policy.load_checkpoint(path)
    return messages


def test_a_flipped_bit_in_any_file_is_found_and_the_file_is_named(ranks, tmp_path):
    messages, messages_of_rank_1 = ranks.run(2, flip_bits, str(tmp_path))
    assert messages == messages_of_rank_1
    kinds = {".metadata", "common.pt", "config.yaml", "metadata.json", "random_00000.pt", "random_00001.pt"}
    assert {name for name in messages if not name.endswith(".distcp")} == kinds | {MANIFEST}
    for name, message in messages.items():
        assert "is damaged" in message and name in message and "use an older one" in message


def draws_after_loading(directory: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's random numbers after saving, after loading, and after loading in another layout."""
    policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER)
    torch.manual_seed(torch.distributed.get_rank())
    path = policy.save_checkpoint(directory, 1)
    drawn = torch.rand(3)
    policy.load_checkpoint(path)
    again = torch.rand(3)
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["layout"] == policy.topology.describe() and manifest["versions"]["torch"] == torch.__version__
    other = build_policy({"tensor": 2}, optimizer=DISTRIBUTED_OPTIMIZER)
    torch.manual_seed(99)
    other.load_checkpoint(path)
    return drawn, again, torch.rand(3)


def test_random_states_are_restored_in_the_layout_that_saved_them(ranks, tmp_path):
    (first, again, other), (second, _, _) = ranks.run(2, draws_after_loading, str(tmp_path))
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(other, torch.rand(3, generator=torch.Generator().manual_seed(99)))


def failures_of_exports(directory: str) -> str:
    """Return what a rank raises when rank 0 cannot export a checkpoint."""
    exporter = Exporter(Path(directory) / "checkpoints" / "sft", Ranks.detect())
    exporter.begin(Path(directory) / "checkpoints" / "sft" / "step-000001")
    with pytest.raises(SaveFailed) as failed:
        exporter.wait()
    return str(failed.value)


def test_every_rank_learns_that_an_export_failed(ranks, tmp_path):
    first, second = ranks.run(2, failures_of_exports, str(tmp_path))
    assert first == second and "step-000001 could not be exported" in first
