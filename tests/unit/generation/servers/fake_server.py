"""Run the fake server as a program, in place of `vllm serve`.

    python -m tests.unit.generation.servers.fake_server PORT [after=SECONDS] [exit=TEXT] [seconds=SECONDS] [token=TOKEN]

It listens after some seconds, or prints a text and ends; it takes some seconds for an answer, and asks
for a token, which is by default that of the run.
"""

import os
import sys
import time

from rl_megatron.generation.servers.access import TOKEN
from tests.fake_vllm import FakeVllm

if __name__ == "__main__":
    port, *options = sys.argv[1:]
    settings = dict(option.split("=", 1) for option in options)
    print("the fake server starts", flush=True)
    if "exit" in settings:
        print(settings["exit"], flush=True)
        sys.exit(3)
    time.sleep(float(settings.get("after", 0)))
    FakeVllm(int(port), settings.get("token", os.environ.get(TOKEN, ""))).seconds = float(settings.get("seconds", 0))
    while True:
        time.sleep(1)
