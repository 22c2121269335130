"""Call a function of users' code, whether it is async or not, from a coroutine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def call_user_code(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """Return what a function returns, and whether it had to be awaited.

    A function that is not async may run its own event loop, as `asyncio.run` does.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs), True
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)  # otherwise asyncio.run would raise in the function
    try:
        result = function(*args, **kwargs)
    finally:
        asyncio._set_running_loop(loop)
    return (await result, True) if inspect.isawaitable(result) else (result, False)
