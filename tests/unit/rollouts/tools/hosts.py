"""Hosts that run functions in this process, and the functions that tests give the model."""

import asyncio
import inspect

from rl_megatron.config.loading.import_strings import load_object
from rl_megatron.rollouts.hosts import HostedCallFailed, HostLost

LARGEST = 1 << 20  # characters


class HostsHere:
    """Runs functions in this process. Each of the first calls is lost, as if another one had ended its process."""

    def __init__(self, losses=0):
        self.losses, self.asked, self.most_at_once, self._running = losses, [], 0, 0

    async def call(self, target, kwargs, timeout):
        self.asked.append((target, dict(kwargs), timeout))
        if self.losses:
            self.losses -= 1
            raise HostLost("another call has ended the process")
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            result = load_object(target, "here")(**kwargs)
            result = await asyncio.wait_for(result, timeout) if inspect.isawaitable(result) else result
        except TimeoutError as error:
            raise HostedCallFailed(f"took longer than {timeout:g} seconds") from error
        except Exception as error:
            raise HostedCallFailed(f"raised {type(error).__name__}: {error}") from error
        finally:
            self._running -= 1
        if isinstance(result, str) and len(result) > LARGEST:
            raise HostedCallFailed(f"returned {len(result)} characters")
        return result


def weather(city: str, days: int = 1) -> str:
    """Say the weather in a city.

    Args:
        city: The city.
        days: For how many days.
    """
    return f"{city}: " + "sunny " * days


async def wait(seconds: float) -> dict:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds, "ü": None}


def fails(text: str) -> str:
    """Raise an error.

    Args:
        text: What it says.
    """
    raise OSError(text)


def pairs(number: int) -> dict:
    """Return a dict whose keys JSON does not have.

    Args:
        number: A number.
    """
    return {(number, number): number}


def huge(digits: int) -> int:
    """Return a large number.

    Args:
        digits: How many digits it has.
    """
    return 10**digits
