"""Train a Hugging Face model by GRPO with rewards of your own: `python train.py MODEL OUTPUT_DIR`."""

import sys

import rl_megatron


def right(completion, answer, **_):
    return float(answer in completion)


def short(completion_ids, **_):
    return 1 - len(completion_ids) / 16


result = rl_megatron.grpo(
    model=sys.argv[1],
    data={"path": "examples/grpo_from_python/capitals.jsonl", "heldout_fraction": 0.25},
    rewards=[right, short],
    output_dir=sys.argv[2],
    algorithm={"prompts_per_step": 8, "samples_per_prompt": 8},
    generation={"max_new_tokens": 16},
    optimizer={"lr": 3e-4},
    train={"steps": 60, "global_batch_size": 64, "batching": "packed"},
)
print(result.metrics)
