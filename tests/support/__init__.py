"""Code that tests share, by subject.

    engine      fake runners, engine loops and links to them, schedulers that are driven by events
    http        a scripted engine behind the HTTP front, and fronts with chats, batches, responses and metrics
    models      tiny checkpoints of every family and format, and a driver for their runners
    kernels     inputs and checks of kernels, Triton's interpreter, compilation for Hopper
    ranks       groups of ranks, as processes or as threads
    processes   actors of an engine, HAProxy, and facts about processes
    structured  schemas, and an engine for requests with grammars

The files beside the folders serve all tests.
"""
