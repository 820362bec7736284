"""The queue of waiting requests: sorted, and without the requests that left."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from runtime.base.types import Request, SamplingParams
from runtime.core.queues import WaitingQueue
from runtime.core.request_state import RequestState
from tests.support.engine.sessions import make
from tests.support.engine.whole import whole_scheduler


def test_requests_that_leave_the_queue_are_forgotten():
    """A request before them always waits, so they never reach the head of the queue."""
    scheduler = whole_scheduler(*make(max_num_seqs=1))
    scheduler.add(Request("first", [1], 1, SamplingParams()))
    gone = [scheduler.add(Request(f"{i}", [2] * 50, 50, SamplingParams(), priority=1)) for i in range(500)]
    for i in range(500):
        scheduler.abort(f"{i}")
    assert len(scheduler.waiting) == 1
    assert len(scheduler.waiting._keys) <= 2
    assert scheduler.waiting.num_tokens == 1
    assert not any(len(state.tokens) or state.request.token_ids for state in gone)


@given(st.lists(st.tuples(st.integers(-1, 1), st.sampled_from(["push", "pop", "leave"])), max_size=60))
def test_the_queue_is_a_sorted_list(history):
    queue, waiting = WaitingQueue(), []
    for number, (priority, kind) in enumerate(history):
        if kind == "push":
            tokens = array("i", [1] * number)
            request = Request("", [], 0, SamplingParams(), prediction=(1,) * (number % 3))
            state = RequestState(request, tokens, 9, frozenset(), (priority, 0, number))
            queue.push(state)
            waiting.append(state)
        elif waiting:
            waiting.sort(key=lambda s: s.sort_key)
            gone = waiting.pop(0 if kind == "pop" else number % len(waiting))
            queue.remove(gone)
        assert queue.first() is min(waiting, key=lambda s: s.sort_key, default=None)
        assert len(queue) == len(waiting)
        assert queue.num_tokens == sum(len(state.tokens) for state in waiting)
        assert len(queue._keys) <= 2 * len(waiting)
