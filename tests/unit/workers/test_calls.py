"""The mark of a call that runs is written word by word, so that another process never reads half of it."""

import time

from rl_megatron.workers.calls import CallMark


class Memory(bytearray):
    """Memory that notes every assignment. What writes into its buffer in another way is not noted."""

    def __init__(self, size):
        super().__init__(size)
        self.written = []

    def __setitem__(self, where, value):
        self.written.append((where.start, bytes(value)))
        super().__setitem__(where, value)


def test_every_part_of_a_mark_is_written_as_one_word():
    memory, began = Memory(CallMark.SIZE), time.monotonic()
    mark = CallMark(memory)  # pyright: ignore[reportArgumentType]
    mark.clear()
    assert mark.read() is None
    with mark.mark_call(2**40, 7):
        assert mark.read() == (2**40, 7)
    assert mark.read() is None and began <= mark.touched <= time.monotonic()
    assert len(memory.written) == 6 and {len(value) for _, value in memory.written} == {8}
    assert {start % 8 for start, _ in memory.written} == {0}
