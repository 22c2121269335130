"""Write the examples of an environment to a file. The task `verifiers` runs it in the interpreter of the library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.verifiers.loading import load


def main(arguments: list[str]) -> None:
    """Write what an environment has to a JSON file: `train` and `heldout`, or `error`.

    Args:
        arguments: The file, and a JSON object with `name`, `kwargs`, `limit` and `paths`, which are directories to
            import modules from.
    """
    file, asked = Path(arguments[0]), json.loads(arguments[1])
    sys.path += [path for path in asked["paths"] if path not in sys.path]
    try:
        environment = load(asked["name"], asked["kwargs"])
        found = {
            name: environment.examples(is_heldout, asked["limit"])
            for name, is_heldout in (("train", False), ("heldout", True))
        }
    except ConfigError as error:
        found = {"error": str(error)}
    file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
