"""Run the fake server as a program, in place of `vllm serve`.

    python -m tests.unit.generation.servers.fake_server PORT [after=SECONDS] [exit=TEXT] [seconds=SECONDS]

It listens after some seconds, or prints a text and ends; and it takes some seconds for an answer.
"""

import sys
import time

from tests.fake_vllm import FakeVllm

if __name__ == "__main__":
    port, *options = sys.argv[1:]
    settings = dict(option.split("=", 1) for option in options)
    print("the fake server starts", flush=True)
    if "exit" in settings:
        print(settings["exit"], flush=True)
        sys.exit(3)
    time.sleep(float(settings.get("after", 0)))
    FakeVllm(int(port)).seconds = float(settings.get("seconds", 0))
    while True:
        time.sleep(1)
