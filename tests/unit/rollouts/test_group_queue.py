"""The queue of groups: with engines and trainers of any speed, no group is too old, and none is lost."""

import heapq
import random

import pytest

from rl_megatron.rollouts.group_queue import EQUAL_REWARDS, NOT_IN_TIME, TOO_OLD, GroupQueue, QueueRules


class Simulation:
    """A trainer and an engine with a clock of their own. Their speeds are drawn anew for every step and group.

    It keeps the age of every group that was used, and what became of each group.
    """

    def __init__(self, rules, seed, share_equal=0.0):
        self.rules, self.chance, self.share_equal = rules, random.Random(seed), share_equal
        self.queue, self.now, self.weights = GroupQueue(rules), 0.0, 1
        self.events, self.started_at = [], {}  # (time, group); the step of the weights when it began
        self.ages, self.ended, self.most_at_once = [], {}, 0

    def run(self):
        for step in range(1, self.rules.num_steps + 1):
            self.weights = step
            self.queue.note_weights(step)
            self.start()
            while not self.queue.is_ready():
                self.advance()
            taken = self.queue.take()
            for number in taken.running:
                self.events = [event for event in self.events if event[1] != number]
            heapq.heapify(self.events)
            self.note(step, taken)
            self.start()
            until = self.now + self.chance.expovariate(1.0) * self.chance.choice([0.1, 1, 10])
            while self.events and self.events[0][0] <= until:
                self.advance()
            self.now = until

    def start(self):
        while (number := self.queue.start()) is not None:
            assert number not in self.started_at, "a group is started twice"
            self.started_at[number] = self.weights
            slow = self.chance.choice([0.1, 1, 1, 1, 20])
            heapq.heappush(self.events, (self.now + slow * self.chance.random(), number))
        running_or_waiting = self.queue.num_running + self.queue.num_ready
        self.most_at_once = max(self.most_at_once, running_or_waiting)

    def advance(self):
        assert self.events, "the step waits, and nothing runs"
        self.now, number = heapq.heappop(self.events)
        oldest = self.chance.randint(self.started_at[number], self.weights)
        self.queue.complete(number, oldest, differs=self.chance.random() >= self.share_equal)
        self.start()

    def note(self, step, taken):
        assert taken.used and len(taken.used) <= self.rules.per_step
        assert not taken.used.keys() & taken.dropped.keys()
        for number, age in taken.used.items():
            assert 0 <= age <= step - self.started_at[number]
            self.ages.append(age)
        for number, reason in {**dict.fromkeys(taken.used, "used"), **taken.dropped}.items():
            assert number not in self.ended, "a group ends twice"
            self.ended[number] = reason


RULES = {
    "the next step only": QueueRules(per_step=3, num_steps=2000, max_age=0),
    "one step ahead": QueueRules(per_step=4, num_steps=2000, max_age=1),
    "four steps ahead": QueueRules(per_step=2, num_steps=2000, max_age=4),
    "more than are needed": QueueRules(per_step=4, num_steps=2000, max_age=1, over_sampling=1.5),
    "more than are needed, all fresh": QueueRules(3, 1000, max_age=0, over_sampling=2.0, keeps_unfinished=False),
    "equal rewards": QueueRules(per_step=3, num_steps=1000, max_age=2, rounds=3, drops_equal=True),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=list(RULES))
def test_no_group_is_too_old_and_each_ends_once(rules):
    """Together, the cases are 10,000 steps."""
    share_equal = 0.5 if rules.drops_equal else 0.0
    simulation = Simulation(rules, seed=len(str(rules)), share_equal=share_equal)
    simulation.run()
    assert max(simulation.ages) == rules.max_age, "the bound is used, and kept"
    left = simulation.started_at.keys() - simulation.ended.keys()
    assert sorted(simulation.started_at) == list(range(len(simulation.started_at))), "no prompt is left out"
    reasons = set(simulation.ended.values())
    if rules.over_sampling == 1:
        assert not left, "no group is made for a step that does not come"
        assert reasons <= {"used", EQUAL_REWARDS}
        assert simulation.most_at_once <= rules.per_step * (rules.max_age + 1)
    else:
        assert reasons & {TOO_OLD, NOT_IN_TIME}
        assert simulation.most_at_once <= rules.for_next_step + rules.per_step * rules.max_age


def test_by_default_every_group_is_learned_from():
    plain = {"over_sampling": 1.0, "keeps_unfinished": True, "rounds": 1, "drops_equal": False}
    assert QueueRules(per_step=2, num_steps=5, max_age=1) == QueueRules(per_step=2, num_steps=5, max_age=1, **plain)


def test_groups_are_used_in_the_order_of_the_stream():
    queue = GroupQueue(QueueRules(per_step=2, num_steps=5, max_age=1))
    queue.note_weights(1)
    assert [queue.start() for _ in range(5)] == [0, 1, 2, 3, None]
    for number in (3, 2, 1):
        queue.complete(number, oldest=1)
    assert not queue.is_ready(), "group 0 still runs"
    queue.complete(0, oldest=1)
    assert queue.take().used == {0: 0, 1: 0}
    assert queue.start() is None, "the weights of step 1 are too old for step 3"
    queue.note_weights(2)
    assert [queue.start() for _ in range(3)] == [4, 5, None]
    assert queue.take().used == {2: 1, 3: 1}


def test_with_over_sampling_a_step_does_not_wait_for_the_slowest():
    for keeps, left in ((True, {}), (False, {1: NOT_IN_TIME})):
        queue = GroupQueue(QueueRules(2, 5, max_age=1, over_sampling=1.5, keeps_unfinished=keeps))
        queue.note_weights(1)
        assert [queue.start() for _ in range(6)] == [0, 1, 2, 3, 4, None]
        for number in (0, 2):
            queue.complete(number, oldest=1)
        taken = queue.take()
        assert taken.used == {0: 0, 2: 0} and taken.dropped == left and list(taken.running) == list(left)
        for number in (3, 4):
            queue.complete(number, oldest=1)
        assert queue.take().dropped == ({1: TOO_OLD} if keeps else {})
        queue.note_weights(3)
        assert queue.start() == 5
        assert queue.state_dict()["again"] == [5]


def test_after_the_most_rounds_a_step_learns_from_fewer_groups():
    queue = GroupQueue(QueueRules(2, 5, max_age=0, rounds=2, drops_equal=True))
    queue.note_weights(1)
    made = []
    while (number := queue.start()) is not None:
        made.append(number)
        queue.complete(number, oldest=1, differs=False)
    assert made == [0, 1, 2, 3] and queue.is_ready()
    taken = queue.take()
    assert taken.used == {3: 0} and taken.dropped == dict.fromkeys((0, 1, 2), EQUAL_REWARDS) and taken.num_refilled == 2


def test_a_queue_goes_on_where_it_was_and_begins_again_what_ran():
    rules = QueueRules(per_step=2, num_steps=9, max_age=2)
    queue = GroupQueue(rules)
    queue.note_weights(1)
    while (number := queue.start()) is not None:
        queue.complete(number, oldest=1)
    queue.take()
    resumed = GroupQueue(rules)
    resumed.load_state_dict(queue.state_dict())
    resumed.replay([2, 3])  # those of step 2, which the log has
    resumed.note_weights(3)
    assert resumed.next_step == 3 and [resumed.start() for _ in range(7)] == [4, 5, 6, 7, 8, 9, None]
    rolled_back = GroupQueue(rules)
    rolled_back.load_state_dict(queue.state_dict())
    rolled_back.leave_out(3)
    rolled_back.note_weights(2)
    assert [rolled_back.start() for _ in range(2)] == [8, 9]


def test_a_log_may_have_groups_that_the_checkpoint_had_not_started():
    queue = GroupQueue(QueueRules(per_step=1, num_steps=9, max_age=1, over_sampling=3.0))
    queue.replay([4, 1])
    queue.note_weights(2)
    assert [queue.start() for _ in range(5)] == [0, 2, 3, 5, None]
