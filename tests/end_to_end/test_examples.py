"""The examples: the commands of each tutorial and of each README run in their order, and do what the page says."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.end_to_end.launch import checkpoints, metrics
from tests.end_to_end.page_commands import check_readme, commands, repository_in, run
from tests.forkserver import REPOSITORY
from tests.parallel.family_cases import assert_same_tensors, tensors
from tests.vllm_servers import needs_vllm

EXAMPLES = REPOSITORY / "examples"
TUTORIALS = REPOSITORY / "docs" / "tutorials"
# The commands of these are those of their tutorials, or tests/packaging/test_cluster_files.py checks their files, or
# tests/end_to_end/test_tinker_sdk.py runs them.
RUN_ELSEWHERE = {*(path.stem for path in TUTORIALS.glob("*.md")), "cluster", "training_service"}
READMES = [
    pytest.param(path.parent.name, marks=needs_vllm if "vllm" in path.parent.name else ())
    for path in sorted(EXAMPLES.glob("*/README.md"))
    if path.parent.name not in RUN_ELSEWHERE
]


@pytest.fixture
def follow(tmp_path, forks):
    """`follow(page)`: run the page's commands one after the other; yields each command with its output.

    At the end, the README of the example is compared with what its commands, which the page has as well, have printed.
    """
    directory = repository_in(tmp_path)

    def commands_of(page):
        readme, printed = (EXAMPLES / page / "README.md").read_text(), {}
        for command in commands((TUTORIALS / f"{page}.md").read_text()):
            done = run(command, directory, forks)
            assert done.status == 0, (command, done)
            printed.setdefault(command, done.err + done.out)
            yield command, done.out
        check_readme(readme, "".join(printed[command] for command in commands(readme)), directory)

    return commands_of


def training(output_dir, stage):
    return [line for line in metrics(output_dir) if (line["stage"], line["kind"]) == (stage, "train")]


def mean(lines, name):
    return sum(line[name] for line in lines) / len(lines)


def close(run, other, names):
    """The metrics of two runs' training steps agree within rounding."""
    pairs = zip(run, other, strict=True)
    return all(one[name] == pytest.approx(two[name], rel=1e-4) for one, two in pairs for name in names)


@pytest.mark.parametrize("name", READMES)
def test_an_example_does_what_its_readme_says(name, tmp_path, forks):
    readme, printed = (EXAMPLES / name / "README.md").read_text(), ""
    directory = repository_in(tmp_path)
    for command in commands(readme):
        if not command.startswith("scripts/install"):  # tests/packaging runs these
            done = run(command, directory, forks)
            assert done.status == 0, (command, done)
            printed += done.err + done.out
    check_readme(readme, printed, directory)


def test_a_loss_of_ones_own(tmp_path, follow):
    outputs = dict(follow("own_loss"))
    steps = training(tmp_path / "outputs" / "own_loss", "grpo")
    assert mean(steps[-5:], "reward") > mean(steps[:5], "reward") + 0.1
    assert all(0 < step["weight"] <= step["weight_max"] <= 20 for step in steps)

    one, two = (training(tmp_path / "outputs" / f"own_loss_{ranks}", "grpo") for ranks in (1, 2))
    assert len(one) == 3 and close(one, two, ("loss", "weight", "weight_max", "weight_limited", "reward"))
    (printed,) = (out for command, out in outputs.items() if "compare_metrics" in command)
    assert 0 < float(printed.split()[-1]) < 1e-4

    (printed,) = (out for command, out in outputs.items() if "plain_function" in command)
    of_class, of_function, learned = printed.splitlines()
    assert of_class.removeprefix("class:") == of_function.removeprefix("function:")
    first, tenth = map(float, re.findall(r"\d+\.\d+", learned))
    assert tenth < first - 2, "the first step alone takes 0.6"


def test_a_reward_of_ones_own(tmp_path, follow):
    dict(follow("own_reward"))
    long, short = (training(tmp_path / "outputs" / name, "grpo") for name in ("own_reward", "own_reward_short"))
    assert len(long) == len(short) == 40
    assert mean(short[-10:], "completion_tokens") < 0.8 * mean(long[-10:], "completion_tokens")
    names = ("reward_contains_score", "reward_contains_numbers", "reward_variety_score")
    assert all(name in step for step in long for name in names)
    for step in short:
        total = step["reward_contains_score"] + 0.1 * (
            step["reward_variety_score"] + step["reward_length_penalty_score"]
        )
        assert step["reward"] == pytest.approx(total, abs=1e-5)


def test_an_algorithm_of_ones_own(tmp_path, follow):
    output_dir = tmp_path / "outputs" / "own_algorithm"
    followed = follow("own_algorithm")
    next(followed)
    before = metrics(output_dir)
    steps = training(output_dir, "improve")
    assert mean(steps[-5:], "reward") > mean(steps[:5], "reward") + 0.1
    assert all(0 < step["kept"] < 1 for step in steps)
    next(followed)
    assert checkpoints(output_dir, "improve") == ["step-000020"]
    _, printed = next(followed)
    assert next(followed, None) is None
    assert "improve step 21/30" in printed and "improve step 20/30" not in printed
    assert metrics(output_dir) == before, "the resumed run takes the same steps"


def test_the_settings_of_an_algorithm_of_ones_own_are_checked(tmp_path, forks):
    given = ("train", "--config-dir", str(EXAMPLES / "own_algorithm"), "experiment=own_algorithm")
    for override, said in (
        ("stages.improve.algorithm.min_reward=2", "algorithm.min_reward=2.0 must be above 0"),
        ("stages.improve.algorithm.min_rewrad=1", "did you mean 'algorithm.min_reward'?"),
    ):
        refused = forks.run(tmp_path, *given, override)
        assert refused.status == 2 and said in refused.err, refused.err


def test_a_model_family_of_ones_own(tmp_path, follow):
    outputs = dict(follow("own_model_family"))
    compared = [out.splitlines() for command, out in outputs.items() if "compare.py" in command]
    assert [lines[0].split()[0] for lines in compared] == ["1", "2"]
    assert all(float(lines[0].split()[-1]) < 1e-4 for lines in compared)
    directory = tmp_path / "outputs" / "own_model_family"
    given, exported, trained = (tensors(directory / name) for name in ("phi3", "exported", "trained"))
    assert_same_tensors(given, exported)
    assert compared[0][1] == f"{len(given)} tensors, {len(given)} exported: the same"
    assert trained.keys() == given.keys() and any((trained[name] != given[name]).any() for name in given)
    steps = training(directory / "run", "sft")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (directory / "phi3" / "config.json").read_bytes() == (directory / "exported" / "config.json").read_bytes()


@pytest.mark.parametrize("rope", [{"partial_rotary_factor": 0.75}, {"rope_type": "longrope", "factor": 4.0}])
def test_what_the_family_cannot_compute_is_refused(tmp_path, forks, rope):
    """As the page says, by name."""
    shutil.copy(EXAMPLES / "own_model_family" / "phi3.py", tmp_path)
    config = {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4} | rope,
    }  # fmt: skip
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    refused = forks.run(tmp_path, "convert", "import", "hf", "there", "--config-dir", ".", "--plugin", "phi3")
    assert refused.status == 2 and next(iter(rope)) in refused.err, refused.err


def test_sft_of_a_hugging_face_model(tmp_path, follow):
    *_, (_, answer) = follow("sft_hugging_face")
    assert answer.strip() == "The capital of France is Paris."
    directory = tmp_path / "outputs" / "sft_hugging_face"
    steps = training(directory / "run", "sft")
    assert steps[0]["loss"] > 6 and steps[-1]["loss"] < 0.2
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (directory / "exported" / name).read_bytes() == (directory / "qwen2" / name).read_bytes(), name
    heldout = [line["nll_per_token"] for line in metrics(directory / "run") if line["kind"] == "eval"]
    assert min(heldout) == heldout[1], "the page says that it is lowest at step 20"


def test_grpo_from_python(tmp_path, follow):
    outputs = dict(follow("grpo_from_python"))
    directory = tmp_path / "outputs" / "grpo_from_python"
    one, two = (training(directory / name, "grpo") for name in ("grpo", "two"))
    assert mean(one[-10:], "completion_tokens") < 0.9 * mean(one[:10], "completion_tokens")
    assert mean(one[-10:], "reward") > mean(one[:10], "reward") + 0.05
    assert mean(one[-10:], "reward_right_score") > 0.85
    assert close(one[:2], two[:2], ("loss", "reward", "grad_norm")), "two ranks take the same steps"
    page = (TUTORIALS / "grpo_from_python.md").read_text()
    file = (EXAMPLES / "grpo_from_python" / "train.py").read_text()
    assert file in page and len([line for line in file.splitlines() if line.strip()]) <= 25
    (shown,) = (out for command, out in outputs.items() if "show-batch" in command)
    assert "«<|im_start|>»assistant" in shown and "reference answer: " in shown


def test_one_process_four_ranks_and_two_nodes(tmp_path, follow):
    outputs = dict(follow("scale_out"))
    compared = [out.splitlines()[1:] for command, out in outputs.items() if "compare_metrics" in command]
    assert [len(lines) for lines in compared] == [3, 2]
    assert all(float(line.split()[-1]) < 1e-4 for lines in compared for line in lines)
    layouts = {
        name: json.loads((tmp_path / "outputs" / "scale_out" / name / "summary.json").read_text())["layout"]
        for name in ("one", "tensor_data", "tensor_pipeline", "two_nodes")
    }
    assert layouts["one"].startswith("1 rank(s)")
    assert layouts["tensor_data"].startswith("4 rank(s): tensor 2 × pipeline 1 × context 1 × data 2")
    assert layouts["tensor_pipeline"].startswith("4 rank(s): tensor 2 × pipeline 2")
    assert layouts["two_nodes"].startswith("2 rank(s): tensor 2")
    (job,) = (out for command, out in outputs.items() if command.startswith("sbatch"))
    assert "2 node(s)" in job
