"""`Executor`: does the work of operations with the model. Every rank calls it with the same operations."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.service.losses import choose_loss
from rl_megatron.service.operations import (
    ComputeLoss,
    Create,
    Fail,
    Load,
    Operation,
    Outcome,
    Restore,
    Sample,
    Save,
    Step,
    Unload,
)
from rl_megatron.service.requests import USER_ERRORS
from rl_megatron.service.run_states import RunStates
from rl_megatron.service.sampling import Sampler
from rl_megatron.service.saved_weights import (
    is_gone,
    load_run,
    load_saved,
    read_saved,
    read_settings,
    save_run,
)
from rl_megatron.service.trainer import ServiceTrainer
from rl_megatron.service.wire import write_loss_result, write_samples
from rl_megatron.training.adapter_runs import SavedAdapter
from rl_megatron.training.metrics import NonFiniteLoss

_ANSWERED = (*USER_ERRORS, NonFiniteLoss)


class Executor:
    """The training runs of a service and the weights that it samples from, on this rank. All methods are collective."""

    def __init__(self, trainer: ServiceTrainer, runs: RunStates, base: str | None, most_cached: int = 16):
        """Begin without saved weights in memory.

        Args:
            trainer: The model.
            runs: The training runs.
            base: The Hugging Face directory of the base model, for saved adapters; None if there is none.
            most_cached: How many saved weights stay in memory for sampling.
        """
        self._trainer, self._sampler, self._runs, self._base = trainer, Sampler(trainer), runs, base
        self._saved: OrderedDict[str, SavedAdapter] = OrderedDict()
        self._most_cached = most_cached

    def execute(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Return the outcome of every operation, on rank 0 with its answer.

        Several operations are samples with the same weights, which are decoded together. If they fail, each is tried
        alone, so that one request does not fail another.
        """
        if len(operations) > 1:
            works = [operation.work for operation in operations]
            try:
                return self._sample([work for work in works if isinstance(work, Sample)])
            except _ANSWERED:
                return [self._execute(operation) for operation in operations]
        return [self._execute(operation) for operation in operations]

    def keep(self, path: Path) -> str | None:
        """Write the states of all runs to the directory `path`; return what failed on the first rank that failed."""
        return self._runs.keep(path)

    def _execute(self, operation: Operation) -> Outcome:
        try:
            return self._do(operation)
        except _ANSWERED as error:
            if isinstance(operation.work, Restore):  # without it, the next kept state would lack the run
                raise RunFailed(f"the run {operation.run} cannot be restored: {error}") from error
            return Outcome(str(error).encode(), error="user")

    def _do(self, operation: Operation) -> Outcome:
        work, name = operation.work, operation.run
        if isinstance(work, Sample):
            return self._sample([work])[0]
        if isinstance(work, Fail):
            raise ValueError(work.message)
        assert name is not None, "only samples have no run"
        if isinstance(work, Create):
            return self._create(operation, name, work)
        if isinstance(work, Restore):
            self._runs.restore(name, self._trainer.find_slot(work.config), Path(work.path))
            return _answer(operation)
        if name not in self._runs:
            raise ValueError(f"the training run {name} is not there: it was unloaded, or could not be made")
        if isinstance(work, Unload):
            self._runs.drop(name)
            return _answer(operation)
        run = self._runs.get(name)
        if isinstance(work, ComputeLoss):
            result = self._trainer.compute(run, work.data, choose_loss(work.loss_fn, work.options), work.backward)
            return Outcome(write_loss_result(result), is_protobuf=True)
        if isinstance(work, Step):
            return _answer(operation, {"metrics": {"grad_norm": run.step(work.params)}})
        if isinstance(work, Save):
            self._trainer.policy.topology.ranks.run_on_rank0(lambda: _refuse_existing(work))
            self._saved.pop(work.path, None)
            save_run(run, Path(work.path), work.manifest, work.with_optimizer, self._base)
            return _answer(operation)
        assert isinstance(work, Load)
        load_run(run, Path(work.path), work.with_optimizer)
        return _answer(operation)

    def _create(self, operation: Operation, name: str, work: Create) -> Outcome:
        run = self._trainer.create(work.config, work.seed)
        if work.path is not None:
            load_run(run, Path(work.path), work.with_optimizer)
        self._runs.add(name, run)
        return _answer(operation)

    def _sample(self, works: Sequence[Sample]) -> list[Outcome]:
        adapter = None if works[0].path is None else self._find_saved(works[0].path)
        results = self._sampler.sample(adapter, [work.prompt for work in works])
        return [Outcome(write_samples(result), is_protobuf=True) for result in results]

    def _find_saved(self, path: str) -> SavedAdapter:
        """Return saved weights, which are read unless they were used lately."""
        if path not in self._saved:
            config = self._trainer.policy.topology.ranks.share(
                lambda: read_settings(read_saved(Path(path))), (ConfigError,)
            )
            self._saved[path] = load_saved(self._trainer.find_slot(config), Path(path))
        self._saved.move_to_end(path)
        while len(self._saved) > self._most_cached:
            self._saved.popitem(last=False)
        return self._saved[path]


def _refuse_existing(work: Save) -> None:
    path = Path(work.path)
    if work.overwrite or not path.exists():
        return
    manifest = read_saved(path)
    if not is_gone(path, manifest) and manifest.get("request") != work.manifest["request"]:
        raise ConfigError(
            f"there are weights with the name {Path(work.path).name} already; pass overwrite, or rename them"
        )


def _answer(operation: Operation, further: Mapping[str, Any] | None = None) -> Outcome:
    return Outcome(json.dumps({**operation.answer, **(further or {})}).encode())
