"""`rl-megatron generate` completes a file of prompts, in any layout, on any engine, and goes on where it was killed."""

import json

import pytest

from tests.end_to_end.launch import train_and_export, trained_checkpoint

PROMPTS = [{"prompt": f"{number}+2="} for number in range(5)]
COMMAND = (
    "--prompts", "prompts.jsonl", "--output", "out.jsonl", "-n", "2", "--seed", "3", "generation.max_new_tokens=6",
    "generation.top_p=0.9",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory, forks):
    """A directory with a trained run in out/, and the same weights as a Hugging Face directory in exported/."""
    return train_and_export(forks, tmp_path_factory.mktemp("trained"))


def generate(forks, directory, weights, *arguments, ranks=1):
    """Run the command, and return the lines of its output."""
    (directory / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    finished = forks.run_ranks(directory, "generate", f"init_from={weights}", *COMMAND, *arguments, ranks=ranks)
    assert [rank.status for rank in finished] == [0] * ranks, finished[0].err
    return [json.loads(line) for line in (directory / "out.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def lines(home, tmp_path_factory, forks):
    return generate(forks, tmp_path_factory.mktemp("once"), trained_checkpoint(home))


def without_logprobs(lines):
    return [{key: value for key, value in line.items() if key != "logprobs"} for line in lines]


def test_each_prompt_gets_its_samples_in_order(lines):
    assert [(line["prompt"], line["sample"]) for line in lines] == [(p, s) for p in range(5) for s in range(2)]
    assert [line["location"] for line in lines[::2]] == [f"prompts.jsonl:{number}" for number in range(1, 6)]
    for line in lines:
        assert 1 <= len(line["ids"]) == len(line["logprobs"]) <= 6
        assert line["reason"] == ("stop" if line["ids"][-1] == 1 else "length")
        assert all(logprob <= 0 for logprob in line["logprobs"]) and isinstance(line["text"], str)
    assert lines[0]["prompt_ids"] == lines[1]["prompt_ids"] and lines[0]["ids"] != lines[1]["ids"]


def test_another_layout_another_engine_and_a_hugging_face_directory_give_the_same(home, lines, tmp_path, forks):
    for name, weights, arguments, ranks in (
        ("tensor", trained_checkpoint(home), ("parallel.tensor=2",), 2),
        ("data", home / "exported", ("generation.batch_size=2",), 2),
        ("engine", home / "exported", ("generation.engine=transformers", "generation.num_engines=2"), 1),
    ):
        (tmp_path / name).mkdir()
        found = generate(forks, tmp_path / name, weights, *arguments, ranks=ranks)
        assert without_logprobs(found) == without_logprobs(lines), name
        for line, other in zip(found, lines, strict=True):
            assert line["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


def test_a_killed_command_goes_on_behind_the_last_complete_line(home, lines, tmp_path, forks):
    assert generate(forks, tmp_path, trained_checkpoint(home)) == lines
    whole = (tmp_path / "out.jsonl").read_bytes()
    ends = [position + 1 for position, byte in enumerate(whole) if byte == ord("\n")]
    (tmp_path / "out.jsonl").write_bytes(whole[: ends[2] + 20])  # three lines, and the beginning of a fourth
    resumed = generate(forks, tmp_path, trained_checkpoint(home))
    assert resumed == lines and (tmp_path / "out.jsonl").read_bytes() == whole
    assert "3 of 10 completions exist already" in (tmp_path / "err0.txt").read_text()
    generate(forks, tmp_path, trained_checkpoint(home))
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    finished = (tmp_path / "err0.txt").read_text()
    assert "10 of 10 completions exist already" in finished and "tokens/s" not in finished, "no weights are loaded"


def test_another_seed_gives_other_completions_in_another_file_only(home, lines, tmp_path, forks):
    generate(forks, tmp_path, trained_checkpoint(home))
    refused = forks.run(tmp_path, "generate", f"init_from={trained_checkpoint(home)}", *COMMAND, "--seed", "4")
    assert refused.status == 2 and "completions of other settings (seed: 3 → 4)" in refused.err
    found = forks.run(
        tmp_path, "generate", f"init_from={trained_checkpoint(home)}", *COMMAND, "--seed", "4", "--output", "b.jsonl"
    )
    assert found.status == 0, found.err
    others = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text("utf-8").splitlines()]
    assert [line["ids"] for line in others] != [line["ids"] for line in lines]


def test_the_seed_decides_nothing_if_completions_are_greedy(home, tmp_path, forks):
    once = generate(forks, tmp_path, trained_checkpoint(home), "-n", "1", "--greedy")
    assert len(once) == len(PROMPTS)
    assert generate(forks, tmp_path, trained_checkpoint(home), "-n", "1", "--greedy", "--seed", "4") == once
