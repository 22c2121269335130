"""Two runs with `train.deterministic` write the same bytes: metrics, apart from times, and checkpoints."""

import torch

from tests.end_to_end.launch import TINY_GRPO, metrics

RUN = ("train", *TINY_GRPO, "train.deterministic=true", "train.steps=4", "train.save_every=2",
       "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")  # fmt: skip

# torch writes a random id of the save into .metadata, and the manifest has the digest of that file.
WITH_A_RANDOM_NUMBER = (".metadata", "manifest.json")


def several_threads() -> None:
    torch.set_num_threads(2)


def report_switches() -> None:
    """Let the policy's training write whether the switches are on."""
    from pathlib import Path

    from rl_megatron.training.megatron_policy import MegatronPolicy

    train = MegatronPolicy.train

    def checked(self, *arguments, **keywords):
        config = self.model.model_chunks[0].config
        Path("switches").write_text(
            f"{torch.are_deterministic_algorithms_enabled()} {config.deterministic_mode} {torch.get_num_threads()}"
        )
        return train(self, *arguments, **keywords)

    MegatronPolicy.train = checked


def test_two_runs_are_equal_to_the_bit(tmp_path, forks):
    files = []
    for name, before in (("one", several_threads), ("two", report_switches)):
        (tmp_path / name).mkdir()
        with forks.start(tmp_path / name, *RUN, ranks=2, before=before) as running:
            done = running.finish_ranks()
        assert [rank.status for rank in done] == [0, 0], done
        saved = tmp_path / name / "out" / "checkpoints"
        found = [path for path in saved.rglob("*") if path.is_file() and path.name not in WITH_A_RANDOM_NUMBER]
        files.append({str(path.relative_to(saved)): path.read_bytes() for path in found})
    assert metrics(tmp_path / "one" / "out") == metrics(tmp_path / "two" / "out") != []
    assert files[0].keys() == files[1].keys() and len(files[0]) > 4
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []
    assert (tmp_path / "two" / "switches").read_text() == "True True 1"
