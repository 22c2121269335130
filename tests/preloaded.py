"""The modules that the server of `tests.forkserver` imports before the first fork.

Importing megatron-core takes a fork six seconds of a core, which is more than most runs of the tests need.
"""

import gc
import importlib

from tests import forked_engines, shape_checks

shape_checks.install()  # before the imports below, because it checks their modules; every fork inherits it
for name in (
    "matplotlib.pyplot",
    "pytest",
    "rl_megatron.certify.command",
    "rl_megatron.cli.early_checks",
    "rl_megatron.generation.transformers.worker",
    "rl_megatron.runs.run",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
):
    importlib.import_module(name)

forked_engines.install()
gc.freeze()  # A collection in a fork then skips a million objects that are never freed.
