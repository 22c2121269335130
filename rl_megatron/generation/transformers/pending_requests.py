"""`PendingRequests`: single requests, which an engine's process decodes between the policy's calls."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rl_megatron.config.errors import describe_error
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.interfaces import Completion, Request
from rl_megatron.generation.requests import PartialCompletion


class PendingRequests:
    """The single requests that have no completion yet. Messages from the policy's process call `add` and `abort`."""

    def __init__(self, answer: Callable[[Sequence[Any], str | None], None], make_decoder: Callable[[], Decoder]):
        """Start without requests.

        `answer` sends (completions, None) to the policy, or (request ids, message) if decoding raised.
        """
        self._send, self._make_decoder = answer, make_decoder
        self._decoder: Decoder | None = None  # it exists only while requests run, because its cache takes memory
        self._held: list[PartialCompletion] = []  # requests that the decoder does not have

    @property
    def can_advance(self) -> bool:
        return self._decoder is not None or bool(self._held)

    # --- messages ---

    def add(self, request: Request) -> None:
        """Add a request."""
        self._held.append(PartialCompletion(request))

    def abort(self, request_id: str) -> None:
        """End a request with the tokens that it has so far."""
        ended = [held.complete("abort") for held in self._held if held.request.request_id == request_id]
        self._held = [held for held in self._held if held.request.request_id != request_id]
        if self._decoder is not None:
            with self._decoder.active():
                ended += self._decoder.abort({request_id})
        self._answer(ended)

    # --- decoding ---

    def hold(self) -> None:
        """Take all requests out of the decoder, because the weights may change or another decoder needs the model.

        Their keys and values are computed again when they continue.
        """
        if self._decoder is not None:
            with self._decoder.active():
                ended, others = self._decoder.evict()
            self._held = [*others, *self._held]
            self._decoder = None
            self._answer(ended)

    def advance(self) -> None:
        """Generate a token for each running request, and send the completions that have ended."""
        try:
            if self._decoder is None:
                self._decoder = self._make_decoder()
            with self._decoder.active():
                self._decoder.add(self._held)
                self._held = []
                ended = self._decoder.advance()
        except Exception as error:  # any failure: the policy's process reports it and decides
            traceback.print_exc()
            self._fail(error)
            return
        if ended is None:
            self._decoder = None
        self._answer(ended or [])

    def _fail(self, error: Exception) -> None:
        decoder, self._decoder = self._decoder, None
        lost = [*self._held, *(() if decoder is None else [*decoder.running, *decoder.waiting])]
        self._held = []
        self._send([sequence.request.request_id for sequence in lost], describe_error(error))

    def _answer(self, completions: list[Completion]) -> None:
        if completions:
            self._send(completions, None)
