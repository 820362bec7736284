"""The limits of an engine's queue."""

from actors.engine.queue_limits import HeldRequests, QueueLimits
from actors.wire.link_messages import Submit
from runtime.base.types import Request, SamplingParams
from runtime.policy.queue_sizes import KeyedBytes, QueueSizes
from tests.support.engine.sessions import make
from tests.support.engine.whole import whole_scheduler


def submit(i: int, num_predicted: int) -> Submit:
    return Submit(i, Request(str(i), [1] * 10, 10, SamplingParams(), prediction=(2,) * num_predicted), resumed=False)


def test_predictions_count_in_the_queue():
    config, info = make(max_queued_tokens=50)
    scheduler = whole_scheduler(config, info)
    limits = QueueLimits(config, scheduler, HeldRequests(None, KeyedBytes()))
    assert limits.refusal(submit(0, 100)) is None, "an empty queue takes any request"
    scheduler.add(submit(0, 20).request)
    assert limits.refusal(submit(1, 10)) is None
    refused = limits.refusal(submit(1, 11))
    assert refused is not None
    assert refused.message.startswith("The engine has 30 tokens waiting and this request has 21, above its limit of 50")
    scheduler.abort("0")
    assert scheduler.extras[QueueSizes].num_predicted == 0
