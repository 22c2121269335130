"""Say how to download a model, if a path that does not exist looks like a name on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)  # OWNER/MODEL


def explain_download(path: Path, as_written: Callable[[str], str] = str) -> str:
    """Return the end of a message about a missing path; it is empty if the path cannot be a name on the Hub.

    A path inside an existing directory is taken for a mistyped path. `as_written` turns the path of the downloaded
    model into what the user should write.
    """
    if not _HUB_NAME.fullmatch(str(path)) or path.parent.exists():
        return ""
    return (
        f"; to use a model of the Hugging Face Hub, run `hf download {path} --local-dir {path.name}` first, and write "
        f"{as_written(path.name)}"
    )
