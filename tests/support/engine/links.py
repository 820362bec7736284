"""Engine loops over real sockets, the links of replicas to them, and requests over these links."""

import asyncio
import threading
import time
from dataclasses import replace

from actors.engine.loop import EngineLoop
from actors.front.engine_group import EngineGroup
from actors.runners.step_channel import RunnersLost
from actors.wire.weight_calls import Applied
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.base.weight_version import WeightVersion
from runtime.loading.adapter_files import read_adapter
from tests.support.engine.fake_runner import EOS, FakeRunner

INFO = ModelInfo("f", 320, 512, (EOS,), 200, 4, "none", "none")


def seed_of(version):
    """The weights of a fake runner are a number, the name of their version."""
    return 0 if version is None or version.name == "default" else int(version.name)


class SlowRunner(FakeRunner):
    """A fake runner that can be killed, hung, or slowed down."""

    draft_head = ""  # what an update does to its head

    def __init__(self, config, info, delay_s=0.0):
        super().__init__(config, info)
        self.delay_s, self.dead, self.deaf, self.closed = delay_s, "", "", threading.Event()
        self.hang = False
        self.staged, self.calls, self.store, self.refuses, self.blocks = [], [], [], {}, {}
        self.version = info.weights
        self.weights = seed_of(info.weights)

    def submit(self, plan):
        if self.deaf:
            raise CallboardError(self.deaf)
        super().submit(plan)

    def collect(self):
        if self.closed.wait(1e9 if self.hang else self.delay_s) or self.dead:
            raise CallboardError(self.dead or "The runner was let go.")
        return super().collect()

    def load_adapter(self, index, path, digest=""):
        if self.closed.is_set() or self.dead:
            raise RunnersLost(self.dead or "The runner was let go.")
        adapter = read_adapter(path)
        adapter.read(digest)
        self.adapters[index] = adapter.digest

    def set_sleep(self, level):
        if self.closed.is_set() or self.dead:
            raise RunnersLost(self.dead or "The runner was let go.")
        assert not self.queue, "a step was in flight"
        if level == 2:
            self.close()
        else:
            self.forget()

    def close(self):
        self.closed.set()

    # ---- updates of weights: a part is any object --------------------------------------------------------------------

    def call(self, method, *arguments):
        method = method.__name__
        if self.closed.is_set() or self.dead:
            raise RunnersLost(self.dead or "The runner was let go.")
        self.calls.append(method)
        if (blocked := self.blocks.get(method)) is not None and not blocked.wait(60):
            raise CallboardError("The test did not go on.")
        if (error := self.refuses.pop(method, None)) is not None:
            raise error
        return [getattr(self, method)(*arguments)]

    def weights_receive(self, part):
        self.staged.append(part)

    def weights_check(self):
        if "bad" in self.staged:
            raise CallboardError("Tensor x has shape [1]; the model has [2].")
        return True

    def weights_apply(self, version):
        assert not self.queue, "a step was in flight"
        self.weights, self.version, self.staged = seed_of(version), version, []
        return Applied(version.fingerprint("f"), self.draft_head)

    def weights_store(self):
        self.store.append(self.version)

    def weights_discard(self):
        self.staged.clear()


class Engine:
    """An engine loop that can be restarted, and the address that links request."""

    def __init__(self, delay_s=0.001, info=None, start=None, pause_file=None, **kw):
        self.pause_file = pause_file
        self.start = start or (lambda: SlowRunner(self.config, self.info, self.delay_s))
        self.config = EngineConfig(**{"block_size": 4, "max_num_seqs": 16, **kw})
        self.delay_s, self.runners, self.info = delay_s, [], info or INFO
        self.same_node, self.num_starts = True, 0
        self.store = []  # the versions of weights that were stored
        self.restart()

    def start_runners(self):
        if self.config.weight_updates:
            version = self.store[-1] if self.store else WeightVersion()
            self.info = replace(self.info, weights=version, fingerprint=version.fingerprint("f"))
        self.runners.append(self.start())
        self.runners[-1].store = self.store
        return self.runners[-1], self.info

    def call_ranks(self, *arguments):
        return self.runners[-1].call(*arguments)

    def load_adapter(self, *place):
        self.runners[-1].load_adapter(*place)

    def set_sleep(self, level):
        self.runners[-1].set_sleep(level)

    async def open_link(self):
        if self.loop is None:
            raise CallboardError("There is no engine.")
        return self.loop.links.open(self.same_node, "127.0.0.1"), self.info

    def die(self):
        """As after kill -9: all connections end at once, without a message."""
        loop, self.loop = self.loop, None
        loop.close()
        for connection in list(loop._connections):
            connection.close()

    def restart(self):
        self.num_starts += 1
        calls = self.load_adapter, self.set_sleep, self.call_ranks
        self.loop = EngineLoop(self.config, self.start_runners, *calls, pause_file=self.pause_file)


class Engines:
    """A directory of engines. An engine's id is its index."""

    def __init__(self, *engines):
        self.all = list(engines)

    def names(self):
        return [f"app/engine/{i}#{e.num_starts}" for i, e in enumerate(self.all) if e.loop is not None]

    async def changed(self, known):
        while (names := self.names()) == known:
            await asyncio.sleep(0.01)
        return names

    def engine(self, name):
        return self.all[int(name.rpartition("/")[2].partition("#")[0])]

    async def open_link(self, name):
        return await self.engine(name).open_link()

    async def weights(self, name, call):
        if (loop := self.engine(name).loop) is None:
            raise CallboardError("The engine has died.")
        answer = loop.weights.call(call)
        while not answer.done():
            if self.engine(name).loop is not loop:
                raise CallboardError("The engine has died.")
            await asyncio.sleep(0.002)
        return answer.result()


def link_to(*engines):
    """A replica's links to these engines."""
    return EngineGroup(Engines(*engines))


def only_link(group):
    (link,) = group.links.values()
    return link


def request(i, **params):
    params = {"max_tokens": 40, "ignore_eos": True, **params}
    prompt = [1 + i % 7, 2, 3 + i % 3, 4, 5]
    return Request(f"r{i}", prompt, len(prompt), SamplingParams(**params))


async def read(link, req):
    tokens, reason, last = [], None, None
    async for output in link.generate(req):
        tokens += output.token_ids
        reason, last = output.finish_reason, output
    return tokens, reason, last


async def eventually(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


def hurry(*engines):
    """Shorten all steps, so that streams end. Until then no stream ends while a test waits."""
    for engine in engines:
        engine.delay_s = 0.001
        for runner in engine.runners:
            runner.delay_s = 0.001
