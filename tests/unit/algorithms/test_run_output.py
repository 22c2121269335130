"""The files that a run has from its start."""

from dataclasses import replace
from types import SimpleNamespace

from rl_megatron.algorithms import run_output
from rl_megatron.config.checkpoint_metadata import HUGGING_FACE
from rl_megatron.config.load import load_config


def test_a_run_that_is_started_again_has_the_hugging_face_files_of_its_start(tmp_path, monkeypatch):
    carried = tmp_path / "start" / HUGGING_FACE
    carried.mkdir(parents=True)
    (carried / "config.json").write_text("{}")
    monkeypatch.setattr(run_output, "save_tokenizer", lambda tokenizer, directory: None)
    lock = SimpleNamespace(release=lambda: None, acquire=lambda: None)
    config = replace(load_config([f"output_dir={tmp_path / 'out'}"]), init_from=str(tmp_path / "start"))
    for name in ("tokenizer.json", "vocab.json"):
        (carried / name).write_text(name)
        run_output.begin_output(config, "train: {}", lock, None)
        (carried / name).unlink()
        kept = tmp_path / "out" / HUGGING_FACE
        assert sorted(path.name for path in kept.iterdir()) == sorted(["config.json", name])
