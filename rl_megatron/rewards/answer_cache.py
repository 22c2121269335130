"""`AnswerCache`: a judge's answers on disk, each stored under a digest of its request."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rl_megatron import log

OFF = "off"


class AnswerCache:
    """A directory with one file per answer. Many processes may share it.

    Files are written atomically, and the first answer is kept: a process that stores another answer to the same request
    gets the first one.
    """

    def __init__(self, directory: str | None):
        """Use a directory. None: rl_megatron/judge in $XDG_CACHE_HOME or ~/.cache. "off": no answer is kept."""
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_megatron" / "judge"
        self._directory = None if directory == OFF else Path(directory).expanduser() if directory else default

    @staticmethod
    def key(request: Mapping[str, object]) -> str:
        """Return the digest of a request, which must be valid JSON data."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> str | None:
        """Return the answer, or None if there is none or its file is damaged."""
        if self._directory is None:
            return None
        try:
            answer = json.loads(self._file(key).read_text(encoding="utf-8"))["answer"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return answer if isinstance(answer, str) else None

    def put(self, key: str, answer: str) -> str:
        """Store an answer, unless another process has stored one; return the stored answer."""
        if self._directory is None:
            return answer
        file = self._file(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as partial:
                json.dump({"answer": answer}, partial)
            try:
                os.link(partial.name, file)
            except FileExistsError:
                if self.get(key) is None:  # the file is damaged
                    os.replace(partial.name, file)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(partial.name)
        except OSError as error:
            log.once(
                f"answers of a judge cannot be kept in {self._directory} ({error}); set cache_dir to another "
                f"directory, or to {OFF!r}"
            )
            return answer
        kept_answer = self.get(key)
        return answer if kept_answer is None else kept_answer

    def _file(self, key: str) -> Path:
        assert self._directory is not None  # the callers have checked
        return self._directory / key[:2] / f"{key[2:]}.json"
