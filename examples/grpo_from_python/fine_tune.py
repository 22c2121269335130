"""Fine-tune a Hugging Face model to answer in a sentence or in a word: `python fine_tune.py MODEL OUTPUT_DIR`."""

import json
import sys
from pathlib import Path

import rl_megatron

model, output_dir = sys.argv[1:]
demonstrations = Path(output_dir).parent / "demonstrations.jsonl"
with demonstrations.open("w") as file:
    for line in Path("examples/grpo_from_python/capitals.jsonl").read_text().splitlines():
        record = json.loads(line)
        question = record["messages"][0]["content"]
        sentence = question.replace("What is the", "The").replace("?", f" is {record['answer']}.")
        for answer in (sentence, record["answer"]):
            messages = [*record["messages"], {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")

rl_megatron.sft(
    model,
    demonstrations,
    output_dir=output_dir,
    optimizer={"lr": 3e-3},
    train={"steps": 200, "global_batch_size": 24, "batching": "packed"},
)
