"""The files of docs/coming_from/files, with small sizes: the experiments that `migrate` makes of them train."""

import json

import pytest

from docs.generate_coming_from import FILES, PAGES
from rl_megatron.cli import main
from tests.docs import inputs
from tests.end_to_end.launch import metrics

# Text of a file → what the test writes instead: fewer and shorter sequences, and the embedded engine in fp32.
SMALL = {
    "nemo_rl": {
        "num_prompts_per_step: 16": "num_prompts_per_step: 2",
        "num_generations_per_prompt: 8": "num_generations_per_prompt: 2",
        "max_num_steps: 400": "max_num_steps: 2",
        "max_val_samples: 128": "max_val_samples: 2",
        "overlong_buffer_length: 64": "overlong_buffer_length: 4",
        "train_global_batch_size: 128": "train_global_batch_size: 4",
        "max_total_sequence_length: 512": "max_total_sequence_length: 32",
        "precision: bfloat16": "precision: float32",
        "lr_warmup_iters: 10": "lr_warmup_iters: 0",
        "backend: vllm": "backend: megatron",
        "path/to/problems.jsonl": "problems.jsonl",
    },
    "verl": {
        "path/to/problems.parquet": "problems.jsonl",
        "path/to/heldout.parquet": "problems.jsonl",
        "prompt_key: prompt": "prompt_key: question",
        "max_prompt_length: 256": "max_prompt_length: 24",
        "max_response_length: 512": "max_response_length: 8",
        "train_batch_size: 64": "train_batch_size: 2",
        "ppo_mini_batch_size: 64": "ppo_mini_batch_size: 2",
        "lr_warmup_steps: 10": "lr_warmup_steps: 0",
        "tensor_model_parallel_size: 2": "tensor_model_parallel_size: 1",
        "dtype: bfloat16": "dtype: float32",
        "name: vllm": "name: null",
        '"n": 8': '"n": 2',
        "total_training_steps: 300": "total_training_steps: 2",
    },
    "trl": {
        "path/to/problems.jsonl": "problems.jsonl",
        "warmup_steps=10": "warmup_steps=0",
        "max_steps=400": "max_steps=2",
        "train_batch_size=8": "train_batch_size=4",
        "accumulation_steps=8": "accumulation_steps=1",
        "num_generations=8": "num_generations=2",
        "max_completion_length=256": "max_completion_length=8",
        "use_vllm=True": "use_vllm=False",
        "bf16=True": "bf16=False",
        "LoraConfig(r=16": "LoraConfig(r=4",
    },
}
REWARD = "def compute_score(solution_str, ground_truth):\n    return -abs(len(solution_str) - 3) / 10\n"


@pytest.mark.nightly
@pytest.mark.parametrize("library", FILES)
def test_the_experiment_of_the_page_trains(library, tmp_path, monkeypatch, forks):
    monkeypatch.chdir(tmp_path)
    text = (PAGES / "files" / FILES[library]).read_text()
    for large, small in SMALL[library].items():
        assert large in text, large
        text = text.replace(large, small)
    (tmp_path / FILES[library]).write_text(text)
    (tmp_path / "rewards.py").write_text(REWARD)
    records = [{"question": f"{n} + 1?", "prompt": f"{n} + 1?", "answer": n + 1, "result": n + 1} for n in range(40)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    inputs.hugging_face_model(tmp_path / "qwen")

    assert main(["migrate", FILES[library], "--output", "mine/experiment/theirs.yaml"]) == 0
    assert forks.run(tmp_path, "convert", "import", "qwen", "checkpoints/Qwen2.5-0.5B").status == 0
    options = ("experiment=theirs", "--config-dir", "mine", "output_dir=out", "data.num_eval_examples=2")
    done = forks.run(tmp_path, "train", *options)
    assert done.status == 0, done
    steps = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert [line["step"] for line in steps] == [1, 2]
    assert all("reward" in line and line["grad_norm"] >= 0 for line in steps)
