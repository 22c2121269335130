"""The configurations that are mutated, over all algorithms and data sources, and the files that they read."""

from __future__ import annotations

import json
from pathlib import Path

from rl_megatron.data.run_tokenizer import train_bpe

# One layer and few records: a step takes milliseconds.
TINY = (
    "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=2",
    "model.num_query_groups=2", "model.max_sequence_length=64", "tokenizer.vocab_size=260", "train.steps=1",
    "data.num_eval_examples=4", "train.global_batch_size=4", "train.micro_batch_tokens=64",
    "generation.max_new_tokens=4", "device=cpu",
)  # fmt: skip
_SUMS = ("data=arithmetic", "data.num_documents=100", "data.num_demonstrations=32")
_GROUPS = ("algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2")
_FILES = ("data.heldout_fraction=0.3",)

BASES: dict[str, tuple[str, ...]] = {
    "pretrain on sums": ("algorithm=pretrain", *_SUMS, "data.sequence_length=16"),
    "pretrain on text": ("algorithm=pretrain", "data.path=text.txt", "data.sequence_length=16", *_FILES),
    "sft on sums": ("algorithm=sft", *_SUMS),
    "sft on answers": ("algorithm=sft", "data.path=answers.jsonl", *_FILES),
    "sft on conversations": (
        "algorithm=sft", "data.path=messages.jsonl", "data.chat_template=chat.jinja", "tokenizer.path=tokenizer",
        *_FILES,
    ),
    "sft on two files": (
        "algorithm=sft", "data.mix=[{path: answers.jsonl, weight: 0.7}, {path: more.jsonl, weight: 0.3}]", *_FILES,
    ),
    "dpo": ("algorithm=dpo", "loss=dpo", "data.path=pairs.jsonl", *_FILES),
    "ipo": ("algorithm=dpo", "loss=ipo", "data.path=pairs.jsonl", "algorithm.precompute_reference=true", *_FILES),
    "reward model": ("algorithm=reward_model", "loss=preference", "data.path=pairs.jsonl", *_FILES),
    "grpo on sums": ("algorithm=grpo", *_SUMS, *_GROUPS),
    "grpo on prompts": (
        "algorithm=grpo", "data.path=prompts.jsonl", "reward.functions=[{path: own.py, name: length}]",
        "reward.num_workers=1", *_GROUPS, *_FILES,
    ),
    "grpo on gsm8k": (
        "algorithm=grpo", "data=gsm8k", "data.source=task", "data.task.name=gsm8k", "data.path=gsm8k.jsonl",
        "algorithm.advantage_estimator=reinforce_plus_plus", "data.task.heldout_fraction=0.3", *_GROUPS,
    ),
    "grpo with own parts": (
        "algorithm=grpo", "data=arithmetic", "data.task.name=own.py:Task", "loss.name=own.py:loss",
        "algorithm.advantage_estimator=own.py:advantages", *_GROUPS,
    ),
    "ppo": ("algorithm=ppo", *_SUMS, *_GROUPS),
}  # fmt: skip

_OWN = """
def loss(data, global_valid_seqs, global_valid_toks, next_token_logprobs):
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    value = -(next_token_logprobs * mask * data["advantages"][:, 1:]).sum() / global_valid_toks
    return value, {"loss": value.detach()}


def advantages(inputs):
    return inputs.rewards - inputs.ranks.moments(inputs.rewards).mean


def length(prompt, completion, **fields):
    return len(completion) / 10


class Task:
    def train_problems(self):
        return [(f"{number:02d}>", "1") for number in range(10, 60)]

    def heldout_problems(self):
        return [(f"{number:02d}>", "1") for number in range(8)]

    def reward(self, problem, completion):
        return float(len(completion) % 3)
"""
_CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def write_files(directory: Path) -> None:
    """Write the files that the configurations read."""
    numbers = range(40)
    lines = {
        "answers": [{"question": f"{n}+1=", "answer": str(n + 1)} for n in numbers],
        "more": [{"question": f"{n}+2=", "answer": str(n + 2)} for n in numbers],
        "gsm8k": [{"question": f"{n}+1=", "answer": f"so\n#### {n + 1}"} for n in numbers],
        "pairs": [{"question": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in numbers],
        "prompts": [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in numbers],
        "messages": [
            {"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": str(n + 1)}]}
            for n in numbers
        ],
    }
    for name, records in lines.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "text.txt").write_text("".join(f"{n} and 1 is {n + 1}.\n" for n in range(200)))
    (directory / "own.py").write_text(_OWN)
    (directory / "chat.jinja").write_text(_CHAT)
    train_bpe((directory / "text.txt").read_text().splitlines(), 260).save(directory / "tokenizer")
    (directory / "broken.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question"\n')
    (directory / "empty.jsonl").write_text("")
