"""Decode requests with continuous batching: a sequence that ends leaves the batch, and a waiting one takes its slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_megatron.generation.decode_graphs import DecodeGraphs
from rl_megatron.generation.interfaces import Completion, Sampling
from rl_megatron.generation.replica import Replica
from rl_megatron.generation.requests import PartialCompletion
from rl_megatron.generation.slots import Slots
from rl_megatron.topology.transfer import send, to_host

_WIDTH_STEP = 32  # the cache widths that steps use are multiples of it, so that many steps have the same shapes
# The same for captured steps. It is larger, because capturing a step takes as long as dozens of replays, but reading
# unused columns is cheap compared with reading the weights.
_CAPTURED_WIDTH_STEP = 256
_BATCH_STEP = 8  # the same for the number of slots on a GPU, where unused slots cost little
PROMPT_TOKENS = {"cpu": 2048, "cuda": 16384}  # maximum per pass, padding included, unless a single prompt is longer
_REFILL_SHARE = 16  # prompts are read once 1/16 of the slots are free, because reading a few prompts at a time is slow


class _State(NamedTuple):
    """The state of a sequence: why it ended (None if it has not), and how many tokens it generated in its slot."""

    end: Literal["stop", "length"] | None
    num_tokens: int


class Decoder:
    """The running and waiting sequences of one model replica. It owns the cache and the state of the running ones.

    All ranks of the replica make the same calls. With expert parallelism, so do all expert-parallel ranks, because they
    compute each other's tokens: an idle rank runs one dummy token.
    """

    def __init__(
        self, replica: Replica, max_slots: int, graphs: DecodeGraphs | None = None, steps_per_check: int | None = None
    ):
        """Begin without sequences; at most `max_slots` will run at the same time.

        The decoder looks for ended sequences only every `steps_per_check` steps, because each check waits for the
        device. None means 8 on a GPU and 1 on a CPU.
        """
        self.replica, self.max_slots, self.device = replica, max_slots, replica.device
        self._steps_per_check = steps_per_check or (8 if replica.device.type == "cuda" else 1)
        self.graphs = graphs
        self.slots = Slots.empty(1, self.device)
        self.cache = replica.make_cache(2, _WIDTH_STEP)  # the last slot, for dummy tokens, is never read
        self.waiting: list[PartialCompletion] = []
        self.running: list[PartialCompletion] = []  # by slot
        self._num_cached: list[int] = []  # an upper bound of the cached tokens of each slot
        self._num_searched: list[int] = []  # tokens of each slot that have been searched for stop strings
        self._by_sampling: list[tuple[Sampling, slice | Tensor]] | None = None
        self._steps_left = 0  # until the next check for ended sequences

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the model use the cache within the context."""
        with torch.no_grad(), self.replica.active():
            self._follow_tensors()
            yield

    def add(self, sequences: Sequence[PartialCompletion]) -> None:
        """Append sequences to those that wait for a slot."""
        self.waiting += sequences

    def advance(self) -> list[Completion] | None:
        """Read prompts into free slots, or generate one token of every running sequence.

        Returns:
            The completions that ended, or None if there was nothing to do.
        """
        if not self._steps_left or not self.replica.shares_experts:  # `agree` between replicas waits for the device
            free = self.max_slots - len(self.running)
            refills = bool(self.waiting) and free >= min(len(self.waiting), -(-self.max_slots // _REFILL_SHARE))
            refills, decodes = self.replica.agree(refills, bool(self.running))
            if refills:
                self._read_prompts(self._take(free) if self.waiting and free else [])
                return []
            if not decodes:
                self._steps_left = 0
                return None
        self._decode()
        self._steps_left = (self._steps_left or self._steps_per_check) - 1
        return [] if self._steps_left else self._remove_ended()

    def abort(self, request_ids: Set[str]) -> list[Completion]:
        """End these sequences now, and return their completions so far."""
        ended = [sequence for sequence in self.waiting if sequence.request.request_id in request_ids]
        self.waiting = [sequence for sequence in self.waiting if sequence.request.request_id not in request_ids]
        slots = [slot for slot, sequence in enumerate(self.running) if sequence.request.request_id in request_ids]
        if slots:
            states = self._read_states()
            self._read_out(slots, [states[slot].num_tokens for slot in slots])
        ended += self._vacate(slots)
        return [sequence.complete("abort") for sequence in ended]

    def evict(self) -> tuple[list[Completion], list[PartialCompletion]]:
        """Remove all sequences; return the completions that ended, and the other sequences with their tokens so far."""
        ended, slots = self._remove_ended(), list(range(len(self.running)))
        if slots:
            self._read_out(slots, [state.num_tokens for state in self._read_states()])
        sequences = self._vacate(slots) + self.waiting
        self.waiting, self._steps_left = [], 0
        return ended, sequences

    def sum_shares(self) -> float:
        """Return the sum, over the running sequences, of generated tokens / maximum number of tokens."""
        count = len(self.running)
        return float((self.slots.generated[:count] / self.slots.limit[:count]).sum())

    # --- prompts ---

    def _take(self, free: int) -> list[PartialCompletion]:
        """Remove and return the next waiting sequences: at most `free` of them, and no more than one pass may read.

        Sequences of similar lengths are read together, because all are padded to the longest. Equal prompts are read
        once.
        """
        self.waiting[:free] = sorted(
            self.waiting[:free], key=lambda sequence: (len(sequence.all_ids), sequence.all_ids)
        )
        limit = PROMPT_TOKENS[self.device.type]
        count, different = 0, set()
        for sequence in self.waiting[:free]:
            different.add(tuple(sequence.all_ids))
            if count and len(sequence.all_ids) * len(different) > limit:
                break
            count += 1
        sequences, self.waiting = self.waiting[:count], self.waiting[count:]
        return sequences

    def _read_prompts(self, sequences: list[PartialCompletion]) -> None:
        """Give sequences slots, and cache all their tokens but the last, which the first decoding step reads."""
        first = len(self.running)
        self._make_space(sequences)
        texts = [tuple(sequence.all_ids[:-1]) for sequence in sequences]
        if sequences:
            self.slots.fill(first, sequences)
            self.running += sequences
            self._num_cached += map(len, texts)
            self._num_searched += [0] * len(texts)
            self._by_sampling = None
        slots = list(range(first, first + len(texts)))
        if not any(texts):
            if slots:
                self.cache.clear(send(torch.tensor(slots), self.device))  # states of earlier sequences in these slots
            if not self.replica.shares_experts:
                self._follow_tensors()
                return
            texts, slots = [(0,)], [self.cache.num_slots - 1]
        width = max(map(len, texts))
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in numbers])
        sources = torch.tensor([numbers[text] for text in texts])
        lengths = torch.tensor([len(text) for text in numbers])
        tokens, sources, at, lengths = send((tokens, sources, torch.tensor(slots), lengths), self.device)
        self.cache.write_prompts(at, sources, lengths)
        self.replica.read(tokens)
        self._follow_tensors()

    def _make_space(self, sequences: list[PartialCompletion]) -> None:
        samplings = [sequence.request.sampling for sequence in sequences]
        num_slots = len(self.running) + len(sequences)
        num_tokens = max([self.slots.tokens.size(1), *(sampling.max_new_tokens for sampling in samplings)])
        num_stops = max([self.slots.stop_ids.size(1), *(len(sampling.stop_ids) for sampling in samplings)])
        longest = max((len(sequence.all_ids) + sequence.tokens_left for sequence in sequences), default=1)
        rounded = min(-(-num_slots // _BATCH_STEP) * _BATCH_STEP, -(-self.max_slots // _BATCH_STEP) * _BATCH_STEP)
        count, capacity = len(self.slots.running), -(-longest // _WIDTH_STEP) * _WIDTH_STEP
        if rounded > count or num_tokens > self.slots.tokens.size(1) or num_stops > self.slots.stop_ids.size(1):
            count = max(rounded, count)
            self.slots.resize(count, num_tokens, num_stops)
        if count + 1 > self.cache.num_slots or capacity > self.cache.capacity:
            self.cache.resize(count + 1, max(capacity, self.cache.capacity))

    # --- tokens ---

    def _decode(self) -> None:
        """Generate one token of every running sequence, without waiting for the device."""
        count, samplings = self._choose_batch_size(), self._group_by_sampling()
        step = _WIDTH_STEP if self.graphs is None else _CAPTURED_WIDTH_STEP
        width = min(self._round_up(max(self._num_cached, default=0) + 1, step, 4), self.cache.capacity)
        if self.graphs is None or len(samplings) > 1:  # several samplings need new index tensors, so no graph fits
            self._step(count, width)
        else:
            self.graphs.run((count, width, samplings[0][0]), partial(self._step, count, width))
        self._num_cached = [cached + 1 for cached in self._num_cached]

    def _step(self, count: int, width: int) -> None:
        """Generate a token in each of the first `count` slots from `width` cache columns. No host state changes."""
        positions = self.slots.position[:count]
        slots = torch.arange(count, device=self.device)
        self.cache.write_tokens(slots, positions, width)
        logits = self.replica.compute_logits(self.slots.next_token[:count], positions)
        self.slots.add(*self._draw(logits, count))

    def _choose_batch_size(self) -> int:
        """Return how many slots a step computes: those that are used, rounded up on a GPU."""
        used = max(len(self.running), 1)
        return used if self.device.type == "cpu" else min(self._round_up(used, _BATCH_STEP, 2), len(self.slots.running))

    def _round_up(self, number: int, step: int, most: int) -> int:
        """Round a number up to a multiple of `step`.

        With CUDA graphs, there are at most `most` (2 or 4) results between two powers of 2, to limit the graphs.
        """
        if self.graphs is not None:
            step = max(step, 1 << max(0, number.bit_length() - most.bit_length()))
        return -(-number // step) * step

    def _follow_tensors(self) -> None:
        """Drop the graphs if a step's tensors have moved in memory."""
        if self.graphs is not None:
            self.graphs.follow([*self.slots.tensors(), *self.cache.tensors(), *self.replica.tensors()])

    def _draw(self, logits: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """Return the next tokens of the first `count` slots and their logprobs, [count] each, on every rank."""
        drawn = torch.zeros(2, count, dtype=torch.float64, device=self.device)  # ids are exact in fp64
        if logits is not None:
            uniforms = self.slots.get_next_uniforms(count)
            for sampling, slots in self._group_by_sampling():
                result = self.replica.sample(logits, uniforms, sampling)
                for target, values in zip(drawn, result, strict=True):
                    target[slots] = values[slots].double()
        self.replica.share(drawn)
        return drawn[0].long(), drawn[1]

    def _group_by_sampling(self) -> list[tuple[Sampling, slice | Tensor]]:
        """Return the different sampling settings of running sequences, and the slots of each."""
        if self._by_sampling is None:
            by_settings: dict[tuple[float, int, float], list[int]] = {}
            for slot, sequence in enumerate(self.running):
                sampling = sequence.request.sampling
                by_settings.setdefault((sampling.temperature, sampling.top_k, sampling.top_p), []).append(slot)
            selections: list[slice | Tensor] = [slice(None)]
            if len(by_settings) > 1:
                selections[:] = send([torch.tensor(slots) for slots in by_settings.values()], self.device)
            samplings = [Sampling(1, *settings) for settings in by_settings] or [Sampling(1)]
            self._by_sampling = list(zip(samplings, selections, strict=True))
        return self._by_sampling

    # --- ends ---

    def _remove_ended(self) -> list[Completion]:
        """Return the completions that ended, and fill their slots with the last sequences."""
        if not self.running:
            return []
        states = self._read_states()
        ended = [slot for slot, state in enumerate(states) if state.end is not None]
        self._read_out(ended, [states[slot].num_tokens for slot in ended])
        completions = []
        for slot, sequence in zip(ended, self._vacate(ended), strict=True):
            reason = states[slot].end
            assert reason is not None  # `ended` has only such slots
            completions.append(sequence.complete(reason))
        return completions

    def _read_states(self) -> list[_State]:
        """Return the state of each running sequence, waiting for the device once.

        If a sequence contains a stop string, `num_tokens` counts the tokens up to the end of that string.
        """
        count = len(self.running)
        columns = [~self.slots.running[:count], self.slots.stopped[:count], self.slots.generated[:count]]
        states_on_device = torch.stack(columns, dim=1)
        if any(sequence.request.sampling.stop_strings is not None for sequence in self.running):
            cached = zip(self.running, self._num_cached, strict=True)
            most_generated = max(number + 1 - len(sequence.all_ids) for sequence, number in cached)
            states_on_device = torch.cat([states_on_device, self.slots.tokens[:count, :most_generated]], dim=1)
        states = []
        for slot, (has_ended, stopped, generated, *tokens) in enumerate(to_host(states_on_device).tolist()):
            until = self._find_stop_string(slot, tokens[:generated])
            if until is not None:
                states.append(_State("stop", until))
            else:
                states.append(_State(("stop" if stopped else "length") if has_ended else None, generated))
        return states

    def _find_stop_string(self, slot: int, generated: list[int]) -> int | None:
        """Return the number of generated tokens up to the end of a slot's first stop string, or None if it has none."""
        sequence, first = self.running[slot], self._num_searched[slot] + 1
        texts = sequence.request.sampling.stop_strings
        if texts is None:
            return None
        numbers = range(first, len(generated) + 1)
        until = next((number for number in numbers if texts.ends([*sequence.ids, *generated[:number]])), None)
        self._num_searched[slot] = len(generated) if until is None else until - 1
        return until

    def _read_out(self, slots: list[int], lengths: list[int]) -> None:
        """Move the first `lengths` tokens of slots from the device to their sequences."""
        if not slots:
            return
        at, width = send(torch.tensor(slots), self.device), max(lengths)
        tokens, bits = self.slots.tokens[at, :width], self.slots.logprobs[at, :width].view(torch.int32)
        tokens, bits = to_host(torch.stack([tokens, bits.long()])).unbind(0)  # both at once
        logprobs = bits.int().view(torch.float32)
        failed = [slot for slot, fails in zip(slots, logprobs.isnan().any(1).tolist(), strict=True) if fails]
        if failed:
            self.cache.clear(send(torch.tensor(failed), self.device))
        for slot, length, ids, values in zip(slots, lengths, tokens.tolist(), logprobs.tolist(), strict=True):
            self.running[slot].add(ids[:length], values[:length], self.replica.weight_version)
        if self.cache.experts is not None:
            self._read_out_experts(slots, self.cache.experts[at])

    def _read_out_experts(self, slots: list[int], experts: Tensor) -> None:
        """Move the routed experts of slots, [slots, layers, capacity, k], from the device to their sequences.

        The last token of a sequence was not read by the model, so it has no routed experts.
        """
        by_position = to_host(self.replica.gather_stages(experts).transpose(1, 2))
        for slot, chosen in zip(slots, by_position, strict=True):
            self.running[slot].routed_experts = chosen[: len(self.running[slot].all_ids) - 1].clone()

    def _vacate(self, slots: list[int]) -> list[PartialCompletion]:
        """Remove and return the sequences of these slots (ascending), and fill the slots with the last sequences."""
        removed = [self.running[slot] for slot in slots]
        count = len(self.running) - len(slots)
        vacated = set(slots)
        targets = [slot for slot in slots if slot < count]
        sources = [slot for slot in range(count, len(self.running)) if slot not in vacated]
        if targets:
            self.slots.move(*(pair := send([torch.tensor(sources), torch.tensor(targets)], self.device)))
            self.cache.move(*pair)
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running[source]
            self._num_cached[target] = self._num_cached[source]
            self._num_searched[target] = self._num_searched[source]
        del self.running[count:], self._num_cached[count:], self._num_searched[count:]
        self._by_sampling = None
        self.slots.running[count:] = False
        return removed
