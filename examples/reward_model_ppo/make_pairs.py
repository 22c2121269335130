"""Write pairs of answers to sums, of which the even one is preferred, for two reward models."""

import json
import random
import sys
from pathlib import Path

from rl_megatron.data.tasks import build_task

NUM_PAIRS = 2000


def main(directory: Path) -> None:
    """Write pairs.jsonl and heldout_pairs.jsonl into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    task = build_task(name="arithmetic", operators=["+"], max_operand=99, zero_pad=True)
    for seed, name in enumerate(("pairs", "heldout_pairs"), start=1):
        source = random.Random(seed)
        with (directory / f"{name}.jsonl").open("w") as file:
            for problem in task.train_problems(NUM_PAIRS, seed=seed):
                near = min(max(int(problem.answer) + source.randint(-10, 10), 0), 198) // 2 * 2
                pair = {"prompt": problem.prompt, "chosen": f"{near:03d}", "rejected": f"{near + 1:03d}"}
                file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
