"""The process of one engine: takes requests from fronts, schedules them, and sends their tokens.

supervisor         keeps one engine alive from within a Serve replica
actor              the engine as a Ray actor
loop               the step thread, and its handlers of messages
live_requests      requests from their arrival to their end
step_frames        the output of a step, as one frame for each front
link_server        the connections of fronts
queue_limits       limits and deadlines of the queue, and requests that wait for an adapter
engine_adapters    loads adapters in a thread of its own
adapter_machine    the states of adapters, as a pure state machine
cache_feed         sends changes of the prefix cache to fronts
sleep              the levels of sleep, and pauses
weights            calls of trainers, and updates of the weights
metrics            counts of the engine, and their sum with its fronts'
autoscaling        the number of engines that an application needs
"""
