"""The files that a run has from its start."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_megatron.config.checkpoint_metadata import HUGGING_FACE
from rl_megatron.config.loading.load import load_config
from rl_megatron.runs import output as run_output


@pytest.fixture
def begin(monkeypatch):
    """Begin a run in a directory; what it would write of its tokenizer is left out."""
    monkeypatch.setattr(run_output, "save_tokenizer", lambda tokenizer, directory: None)
    lock = SimpleNamespace(release=lambda: None, acquire=lambda: None)
    return lambda config: run_output.begin_output(config, "train: {}", lock, None)


def test_a_run_that_is_started_again_has_the_hugging_face_files_of_its_start(tmp_path, begin):
    carried = tmp_path / "start" / HUGGING_FACE
    carried.mkdir(parents=True)
    (carried / "config.json").write_text("{}")
    config = replace(load_config([f"output_dir={tmp_path / 'out'}"]), init_from=str(tmp_path / "start"))
    for name in ("tokenizer.json", "vocab.json"):
        (carried / name).write_text(name)
        begin(config)
        (carried / name).unlink()
        kept = tmp_path / "out" / HUGGING_FACE
        assert sorted(path.name for path in kept.iterdir()) == sorted(["config.json", name])


LEFTOVERS = (
    "checkpoints/sft/step-000002.incomplete/part", "checkpoints/sft/step-000001.deleted/part",
    "checkpoints/sft/step-000003.replaced/part", "exported/sft/step-000002.new/part", "report.html.17.incomplete",
    "rollouts/sft/step-000001.parquet.9.incomplete", "evaluations/sft/sums/step-000001.parquet.9.incomplete",
)  # fmt: skip
KEPT = (
    "checkpoints/sft/step-000001/part", "backup.new/part", "project/lib.deleted/part", "download.incomplete",
    "other/checkpoints/sft/step-000002.incomplete/part", "checkpoints/sft/step-000004.without-manifest-1/part",
)  # fmt: skip


def test_what_killed_runs_have_left_is_removed_and_nothing_of_the_user(tmp_path, begin):
    out = tmp_path / "out"
    for name in (*LEFTOVERS, *KEPT):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    begin(load_config([f"output_dir={out}"]))
    assert [name for name in (*LEFTOVERS, *KEPT) if (out / name).exists()] == list(KEPT)
