"""No collective waits for ever: every process group that a policy uses has the run's timeout."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.layouts import EXPERTS, MODEL, VOCAB_SIZE
from tests.worker_pool import COLLECTIVE_TIMEOUT

MINUTES = 7.0


def _timeouts(parallel: dict) -> dict[str, timedelta]:
    """Return the timeout of every process group of this rank after a policy with an optimizer was built."""
    layout = topology.build(ParallelConfig(**parallel), start_device("cpu"), 0, MINUTES)
    model = EXPERTS if "expert" in parallel else MODEL
    MegatronPolicy(model, layout, vocab_size=VOCAB_SIZE, optimizer=OptimizerConfig(lr=1e-2, distributed=True))
    groups = dist.distributed_c10d._world.pg_names
    return {
        name: group._get_backend(torch.device("cpu")).options._timeout
        for group, name in groups.items()
        if group is not dist.group.WORLD
    }


@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2, "pipeline": 2}, {"context": 2, "expert": 2}, {"expert": 4}],
    ids=lambda each: "-".join(each),
)
def test_every_process_group_has_the_timeout_of_the_run(ranks, parallel):
    for timeouts in ranks.run(4, _timeouts, parallel):
        assert len(timeouts) > 4, "the groups of the layout were not found"
        assert set(timeouts.values()) == {timedelta(minutes=MINUTES)}, timeouts
    assert timedelta(minutes=MINUTES) != COLLECTIVE_TIMEOUT, "the pool's timeout would hide a missing one"
