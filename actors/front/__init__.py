"""A front's view of the engines. The HTTP server uses it as an `EngineClient` (actors/wire/engine_client.py).

engine_group       an application's engines: assigns streams to them, and moves streams between them
link               the connection to one engine, and the streams that it serves
from_zero          calls for an engine while requests wait for one
parked             streams that wait for an engine, and their limits
client_stream      a live request of this front; it outlives links and engines
router             chooses an engine by prefix caches and load
front_adapters     the application's adapters, and how to load and unload them
weight_calls       calls about weights to all engines at once"""
