"""One engine's process: takes requests from fronts, schedules them, and sends their tokens.

supervisor         keeps one engine alive from within a Serve replica
actor              the engine as a Ray actor
loop               the step thread, and its message handlers
live_requests      requests from their arrival to their end
step_frames        a step's output, as one frame for each front
link_server        the fronts' connections
queue_limits       the queue's limits and deadlines, and requests that wait for an adapter
engine_adapters    loads adapters in its own thread
adapter_machine    the adapters' states, as a pure state machine
cache_feed         sends prefix-cache changes to fronts
sleep              sleep levels, and pauses
weights            trainers' calls, and weight updates
metrics            the engine's counts, and their sum with its fronts'
autoscaling        the number of engines that an application needs"""
