"""The modules that the server of `tests.forkserver` imports before the first fork."""

import gc

import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint
import torch.utils.tensorboard  # noqa: F401

from tests import forked_engines, shape_checks

shape_checks.install()  # before the imports below, because it checks their modules; every fork inherits it


forked_engines.install()
gc.freeze()  # A collection in a fork then skips a million objects that are never freed.
