"""Two engines of a node and the tier between them: one takes the other's streams over, or one computes prompts only.

    python -m benchmarks.engine.tier_pair takeover --model llama-3.1-8b --streams 8 --tokens 32000 --memory 64
    python -m benchmarks.engine.tier_pair apart --model llama-3.1-8b --memory 64 --gpus 2

Each engine is a process of its own with random weights in a published shape, without Ray. With one GPU both share it.
Work begins when both have pinned the tier's memory, which takes some seconds after a start.

takeover: the first engine decodes the streams and is killed. The second one goes on with them.

    | figure | what |
    | --- | --- |
    | first_ms, all_ms | from the kill to the first stream's next token, and to the last one's |
    | computed_ms | the same without hits, under another salt |
    | hit_tokens | the second engine's, from the tier |
    | different | tokens that differ from the computed ones |

apart: `--chats` chats with `--chat` tokens at a time, and a prompt with `--long` tokens each `--every` seconds.

    | roles | what |
    | --- | --- |
    | both | each engine has half of the chats, and each second long prompt |
    | apart | the first engine computes all prompts and one token; the second one decodes from the tier |
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np

from benchmarks.library.measure import Engine, Results, engine_config, new_parser, percentiles
from benchmarks.library.models import spec_of
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.tier.gpu_copies import GpuCopier
from runtime.tier.place import base_folder, forget

_MORE = 16  # tokens of each continued stream


class Ask(NamedTuple):
    """A request for an engine's process."""

    name: str
    prompt: list[int]
    max_tokens: int
    salt: str = ""


@dataclass(slots=True)
class Stream:
    """The tokens of one request so far."""

    prompt: list[int]
    max_tokens: int
    is_long: bool = False
    sent: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, model: str, config: EngineConfig, gpu: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, model, config, gpu))
        self._process.start()
        other.close()

    def ask(self, name: str, prompt: list[int], max_tokens: int, salt: str = "") -> None:
        """Send a request."""
        self.pipe.send(Ask(name, prompt, max_tokens, salt))

    def hit_tokens(self) -> int:
        """Return the tokens that were loaded from the tier so far. The engine is idle."""
        self.ask("", [], 0)
        tokens: int = self.pipe.recv()
        return tokens

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, model: str, config: EngineConfig, gpu: int) -> None:
    """Answer requests until the process is killed. A message has a time, and names with their next tokens."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    engine = Engine(model, config, paced=True)
    core, copier = engine.core, engine.runner.tier
    while isinstance(copier, GpuCopier) and copier.pinned.is_pinning:
        time.sleep(0.01)
    pipe.send((time.monotonic(), []))
    while True:
        while pipe.poll(0 if core.has_work else None):
            ask = pipe.recv()
            if not ask.name:
                pipe.send(int(core.stats()["tier_hit_tokens"]))
                continue
            params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
            core.add(Request(ask.name, ask.prompt, len(ask.prompt), params, cache_salt=ask.salt), owner=ask.name)
        output = core.step()
        if output is not None and output.token_ids:
            names = [state.owner for state in output.states]
            pipe.send((time.monotonic(), list(zip(names, output.token_ids, strict=True))))


def receive(engines: list[EngineProcess], streams: dict[str, Stream], timeout: float | None) -> list[str]:
    """Add the tokens of the next messages, up to `timeout` seconds. Returns the streams' names, one for each token."""
    names = []
    ready = wait([engine.pipe for engine in engines], timeout)
    for pipe in ready:
        assert isinstance(pipe, Connection)
        now, pairs = pipe.recv()
        for name, token in pairs:
            stream = streams[name.partition(":")[0]]
            stream.tokens.append(token)
            stream.times.append(now)
            names.append(name)
    return names


def takeover(engines: list[EngineProcess], texts: Iterator[list[int]], count: int, before: int) -> dict[str, Any]:
    """Kill the first engine when each of `count` streams has `before` tokens, and continue them on the second one."""
    first, second = engines
    streams = {str(i): Stream(next(texts), 2 * before) for i in range(count)}
    for name, stream in streams.items():
        first.ask(name, stream.prompt, before + 4096)  # it still decodes at the kill
    while min(len(stream.tokens) for stream in streams.values()) < before:
        receive([first], streams, None)
    first.kill()
    known = {name: len(stream.tokens) for name, stream in streams.items()}
    tier, hits = _continue(second, streams, ""), second.hit_tokens()
    answers = {name: stream.tokens[known[name] :] for name, stream in streams.items()}
    for name, stream in streams.items():
        del stream.tokens[known[name] :]
    computed = _continue(second, streams, "another")
    different = sum(
        a != b for name, s in streams.items() for a, b in zip(answers[name], s.tokens[known[name] :], strict=False)
    )
    figures = {"first_ms": tier[0], "all_ms": tier[-1], "computed_first_ms": computed[0], "computed_ms": computed[-1]}
    return figures | {"hit_tokens": hits, "compared": sum(map(len, answers.values())), "different": different}


def _continue(engine: EngineProcess, streams: dict[str, Stream], salt: str) -> list[float]:
    """Let each stream have 16 more tokens. Returns the milliseconds until each next token, in order."""
    begin, counts = time.monotonic(), {name: len(stream.tokens) for name, stream in streams.items()}
    for name, stream in streams.items():
        engine.ask(f"{name}:{salt}", stream.prompt + stream.tokens, _MORE, salt)
    while any(len(stream.tokens) < counts[name] + _MORE for name, stream in streams.items()):
        receive([engine], streams, None)
    return sorted(1e3 * (stream.times[counts[name] - len(stream.tokens)] - begin) for name, stream in streams.items())


@dataclass(frozen=True, slots=True)
class Load:
    """The work of `apart`."""

    chats: int
    chat: tuple[int, int]  # tokens in, out
    long: int  # tokens of a long prompt
    every: float  # seconds between two long prompts
    seconds: float


def mixed(engines: list[EngineProcess], texts: Iterator[list[int]], load: Load, is_apart: bool) -> dict[str, Any]:
    """Run the load. With `is_apart` the second engine continues what the first one has begun."""
    streams, running, begin = dict[str, Stream](), 0, time.monotonic()
    next_long, ended = begin + load.every, list[Stream]()

    def start(is_long: bool, place: int) -> None:
        size = load.long if is_long else load.chat[0]
        stream = Stream(next(texts)[:size], 16 if is_long else load.chat[1], is_long, time.monotonic())
        name = f"{len(streams)}-{place}"
        streams[name] = stream
        engines[0 if is_apart else place % 2].ask(name, stream.prompt, 1 if is_apart else stream.max_tokens)

    for place in range(load.chats):
        start(False, place)
    while (now := time.monotonic()) < begin + load.seconds or running:
        if now >= next_long and now < begin + load.seconds:
            next_long += load.every
            start(True, len(streams))
        for name in receive(engines, streams, 0.01):
            own = name.partition(":")[0]
            stream = streams[own]
            if is_apart and len(stream.tokens) == 1:
                engines[1].ask(f"{own}:more", stream.prompt + stream.tokens, stream.max_tokens - 1)
            if len(stream.tokens) == stream.max_tokens:
                ended.append(stream)
                if not stream.is_long and now < begin + load.seconds:
                    start(False, int(own.partition("-")[2]))
        running = len(streams) - len(ended)
    chats, long = ([s for s in streams.values() if s.is_long is own] for own in (False, True))
    gaps = np.concatenate([np.diff(stream.times) for stream in chats])
    firsts = {name: [s.times[0] - s.sent for s in own] for name, own in (("chat", chats), ("long", long))}
    return {
        "itl_ms": percentiles(gaps), "chat_ttft_ms": percentiles(firsts["chat"]),
        "long_ttft_ms": percentiles(firsts["long"]), "chats": len(chats), "long": len(long),
        "output_tok_s": sum(len(s.tokens) for s in streams.values()) / (time.monotonic() - begin),
    }  # fmt: skip


def random_texts(model: str, length: int) -> Iterator[list[int]]:
    """Texts that share no prefix."""
    rng, size = np.random.default_rng(0), spec_of(model).vocab_size
    while True:
        yield rng.integers(0, size, length).tolist()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("case", choices=["takeover", "apart"])
    parser.add_argument("--memory", type=float, default=1.0, metavar="GIB", help="size of the tier")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32_000, help="tokens of a stream's prompt")
    parser.add_argument("--before", type=int, default=64, help="tokens of each stream before the kill")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--chat", type=int, nargs=2, default=[1024, 256], metavar="TOKENS", help="in and out")
    parser.add_argument("--long", type=int, default=16_000, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two long prompts")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    config = engine_config(args.set, kv_tier_memory=args.memory, kv_tier_name=f"benchmark-{os.getpid()}")
    results = Results("tier_pair", args.out)
    engines: list[EngineProcess] = []
    try:
        for i in range(2):
            # Engines on one GPU start one after the other: each of them measures the free memory.
            share = {"gpu_memory_utilization": 0.45 * (i + 1)} if args.gpus == 1 else {}
            engines.append(EngineProcess(args.model, replace(config, **share), i % args.gpus))
            engines[-1].pipe.recv()  # it is ready
        if args.case == "takeover":
            texts, common = random_texts(args.model, args.tokens), {"streams": args.streams, "tokens": args.tokens}
            results.add(
                case=args.case, model=args.model, **common, **takeover(engines, texts, args.streams, args.before)
            )
        else:
            texts = random_texts(args.model, max(args.long, args.chat[0]))
            load = Load(args.chats, tuple(args.chat), args.long, args.every, args.seconds)
            for is_apart in (False, True):
                figures = mixed(engines, texts, load, is_apart)
                roles = "apart" if is_apart else "both"
                results.add(case=args.case, model=args.model, gpus=args.gpus, roles=roles, load=asdict(load), **figures)
    finally:
        for engine in engines:
            engine.kill()
        forget(base_folder(), str(config.kv_tier_name))


if __name__ == "__main__":
    main()
