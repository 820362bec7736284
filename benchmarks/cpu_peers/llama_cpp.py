"""llama.cpp as a side, through the wheel `xllamacpp`.

`decode` and `prompt` call `llama_decode` and the greedy sampler of the library by ctypes, as llama-bench does: no
server, no text. `batch8` sends eight completions at once to the wheel's server in this process, which has eight slots
and continuous batching. All settings are llama.cpp's defaults, except the threads and the size of the context."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_bool, c_char_p, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.cpu_peers.jobs import BATCH, LONG_PROMPT_TOKENS, PROMPT_TOKENS, Job, Measure, arguments, do_jobs

SLOT_TOKENS = 512  # of the context of each slot; also the default of llama_context_params


class _Struct(ctypes.Structure):
    """A parameter struct or a batch, by value. It is larger than each of these, because nothing here reads a field."""

    _fields_ = (("words", ctypes.c_uint64 * 128),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {  # function -> its result and its arguments
    "llama_backend_init": (None,),
    "llama_model_default_params": (_Struct,),
    "llama_context_default_params": (_Struct,),
    "llama_model_load_from_file": (c_void_p, c_char_p, _Struct),
    "llama_init_from_model": (c_void_p, c_void_p, _Struct),
    "llama_n_ctx": (c_uint32, c_void_p),
    "llama_set_n_threads": (None, c_void_p, c_int32, c_int32),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_batch_get_one": (_Struct, c_void_p, c_int32),
    "llama_decode": (c_int32, c_void_p, _Struct),
    "llama_sampler_init_greedy": (c_void_p,),
    "llama_sampler_sample": (c_int32, c_void_p, c_void_p, c_int32),
}


def _library() -> ctypes.CDLL:
    """llama.cpp's own functions, which the wheel's one extension module exports."""
    (path,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    for name, (result, *operands) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, operands
    return library


class Context:
    """A model and a context of one sequence."""

    def __init__(self, model: str, threads: int) -> None:
        self._calls = calls = _library()
        calls.llama_backend_init()
        loaded = calls.llama_model_load_from_file(model.encode(), calls.llama_model_default_params())
        self._context = calls.llama_init_from_model(loaded, calls.llama_context_default_params())
        assert self._context, f"llama.cpp did not load {model}"
        assert calls.llama_n_ctx(self._context) > LONG_PROMPT_TOKENS
        calls.llama_set_n_threads(self._context, threads, threads)
        self._sampler = calls.llama_sampler_init_greedy()

    def clear(self) -> None:
        """Forget all tokens."""
        self._calls.llama_memory_clear(self._calls.llama_get_memory(self._context), True)

    def next_token(self, token_ids: list[int]) -> int:
        """Compute tokens, and return the greedy choice after them."""
        tokens = (c_int32 * len(token_ids))(*token_ids)
        status = self._calls.llama_decode(self._context, self._calls.llama_batch_get_one(tokens, len(token_ids)))
        assert status == 0, f"llama_decode returned {status}"
        return self._calls.llama_sampler_sample(self._sampler, self._context, -1)


class LlamaCpp:
    """The cells, with a context and a server that start when a cell needs them."""

    def __init__(self, model: str, threads: int) -> None:
        self._model, self._threads = model, threads
        self._context: Context | None = None
        self._server: Any = None

    def decode(self, job: Job) -> dict[str, float]:
        (prompt,), context = job.prompts(1, PROMPT_TOKENS), self._opened()
        token = context.next_token(prompt)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(job.new_tokens - 1):
            token = context.next_token([token])
        seconds, cpu, num_after = time.perf_counter() - start, time.process_time() - cpu, job.new_tokens - 1
        return {"tok_s": num_after / seconds, "cpu_ms": 1e3 * cpu / num_after}

    def prompt(self, job: Job) -> dict[str, float]:
        (prompt,), context = job.prompts(1, LONG_PROMPT_TOKENS), self._opened()
        start = time.perf_counter()
        context.next_token(prompt)
        return {"tok_s": LONG_PROMPT_TOKENS / (time.perf_counter() - start)}

    def batch8(self, job: Job) -> dict[str, float]:
        if self._server is None:
            self._server = xllamacpp.Server(server_params(self._model, self._threads, BATCH))

        def complete(prompt: list[int]) -> int:
            fields = {"prompt": prompt, "max_tokens": job.new_tokens, "temperature": 0, "ignore_eos": True}
            return self._server.handle_completions(fields)["usage"]["completion_tokens"]

        with ThreadPoolExecutor(BATCH) as threads:
            start = time.perf_counter()
            counts = list(threads.map(complete, job.prompts(BATCH, PROMPT_TOKENS)))
            seconds = time.perf_counter() - start
        assert counts == [job.new_tokens] * BATCH
        return {"tok_s": BATCH * job.new_tokens / seconds}

    def _opened(self) -> Context:
        """The context, without tokens."""
        self._context = self._context or Context(self._model, self._threads)
        self._context.clear()
        return self._context


def server_params(model: str, threads: int, slots: int, slot_tokens: int = SLOT_TOKENS) -> Any:
    """The parameters of a server."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx = slots, slots * slot_tokens
    return params


def load(settings: dict[str, Any]) -> tuple[Mapping[str, Measure], dict[str, str]]:
    cells = LlamaCpp(settings["model"], settings["threads"])
    facts = {"version": xllamacpp.__version__, "instructions": str(xllamacpp.get_system_info()).strip()}
    return {"decode": cells.decode, "prompt": cells.prompt, "batch8": cells.batch8}, facts


def serve(settings: dict[str, Any]) -> None:
    """Serve HTTP with one slot until a signal."""
    params = server_params(settings["model"], settings["threads"], 1, settings["context"])
    params.port = settings["port"]
    server = xllamacpp.Server(params)  # it serves from threads of its own
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    if "port" in arguments():  # `servers.py` starts a server
        serve(arguments())
    else:
        do_jobs(load)
