"""`Installed`: the distributions and modules of a Python environment, found without importing any of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import machinery, metadata
from pathlib import Path

from packaging.requirements import Requirement

_CUDA_OF_TORCH = re.compile(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)  # in torch/version.py


class Installed:
    """What is installed in the directories of `path`.

    Args:
        path: Directories as in `sys.path`; None means `sys.path` itself.
    """

    def __init__(self, path: Sequence[str] | None = None):
        self._path = None if path is None else list(path)

    def version(self, name: str) -> str | None:
        """Return the version of a distribution, or None if it is not installed."""
        found = self._distribution(name)
        return None if found is None else found.version

    def requirements(self, name: str) -> list[Requirement]:
        """Return what a distribution requires in this environment, without its extras."""
        found = self._distribution(name)
        every = [Requirement(text) for text in (found.requires or [])] if found is not None else []
        return [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]

    def module(self, name: str) -> Path | None:
        """Return the directory of a package, or the file of a module, at the top level; None if there is none."""
        spec = machinery.PathFinder.find_spec(name, self._path)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
        return Path(places[0]) if places else Path(spec.origin) if spec.origin else None

    def cuda_of_torch(self) -> tuple[int, int] | None:
        """Return the CUDA version that torch was built for, or None for a CPU build or without torch."""
        torch = self.module("torch")
        if torch is None or not (torch / "version.py").is_file():
            return None
        found = _CUDA_OF_TORCH.search((torch / "version.py").read_text("utf-8"))
        return None if found is None else (int(found[1]), int(found[2]))

    def _distribution(self, name: str) -> metadata.Distribution | None:
        if self._path is None:
            return next(iter(metadata.distributions(name=name)), None)
        return next(iter(metadata.distributions(name=name, path=self._path)), None)
