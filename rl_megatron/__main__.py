"""Run the command line as `python -m rl_megatron`."""

import sys

from rl_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
