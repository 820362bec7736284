"""llama.cpp's HTTP server with one slot, until a signal ends it; `servers.py` starts it."""

from __future__ import annotations

import signal

import xllamacpp

from benchmarks.cpu_peers.jobs import arguments
from benchmarks.cpu_peers.llama_cpp import server_params


def main() -> None:
    settings = arguments()
    params = server_params(settings["model"], settings["threads"], 1, settings["context"])
    params.port = settings["port"]
    server = xllamacpp.Server(params)  # it serves from threads of its own
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
