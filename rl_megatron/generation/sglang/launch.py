"""Start SGLang's server with the run's token as its API key.

Usage: python launch.py ARGUMENTS…

The environment variable `RL_MEGATRON_SERVER_TOKEN` has the token. SGLang accepts its key only as an argument, which all
users would see in the list of processes. So this script adds the argument within the process. It runs in SGLang's
environment, which may lack this package.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # its modules would hide others of the same names
    token = os.environ.get("RL_MEGATRON_SERVER_TOKEN")
    sys.argv += [f"--api-key={token}"] if token else []  # one argument, because a token can begin with a dash
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
