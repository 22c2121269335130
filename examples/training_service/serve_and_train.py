"""Start a server, and run the client grpo.py beside it. In practice, each has a machine of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rl_megatron.data.tasks import build_task

DIRECTORY = Path("outputs/training_service")
MODEL = "outputs/sums/checkpoints/sft/step-000016"
PORT = "8321"
SERVER = ["training-server", f"init_from={MODEL}", "device=cpu", "--name", "sums", "--port", PORT]


def write_problems(num_train: int, num_heldout: int) -> None:
    """Write sums.jsonl and heldout_sums.jsonl for the client."""
    task = build_task(name="arithmetic", operators=["+"], max_operand=99, zero_pad=True)
    for name, problems in (
        ("sums", task.train_problems(num_train)), ("heldout_sums", task.heldout_problems(num_heldout)),
    ):  # fmt: skip
        lines = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> int:
    client = Path(__file__).parent / "grpo.py"
    write_problems(80 * 64, 400)
    server = subprocess.Popen([sys.executable, "-m", "rl_megatron", *SERVER, "--directory", DIRECTORY])
    try:
        key = DIRECTORY / "key"
        while not key.exists() and server.poll() is None:
            time.sleep(0.5)
        if server.poll() is not None:
            return server.returncode
        environment = os.environ | {
            "TINKER_BASE_URL": f"http://127.0.0.1:{PORT}", "TINKER_API_KEY": key.read_text().strip()
        }  # fmt: skip
        return subprocess.run([".venv-tinker/bin/python", client], env=environment).returncode
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
