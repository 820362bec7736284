"""Processes are killed in each phase of a weight update, while streams run: each token is that of its version.

An engine of two ranks alternates between two sets of weights. Models in this process compute each span of the answers
again."""

import asyncio
import fcntl
import os
import signal
from contextlib import contextmanager

import pytest
import pytest_asyncio
import ray
from safetensors.torch import load_file

from actors.client import weight_list
from actors.wire.engine_client import WeightsRefused
from actors.wire.weight_calls import ActorPart, Finish, GetState, Receive, Start
from runtime.base.types import Request, SamplingParams
from runtime.base.weight_parts import FilesPart, TensorInfo
from runtime.llm import LLM
from serve_app.processes.application_processes import processes_of
from tests.support.models.divisible_model import write_divisible_model
from tests.support.processes.fault_cells import has_ended
from tests.support.processes.server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [[3 + (31 * i + 7 * j) % 250 for j in range(10 + i)] for i in range(4)]
NUM_TOKENS = 200  # of an answer
IN_TIME_S = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one shape."""
    return [write_divisible_model(tmp_path_factory.mktemp("weights"), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders):
    """Both, in this process. Two ranks compute the same bits as one."""
    exact = {"deterministic": True, "rank_invariant": True, "num_threads": 1}
    return [LLM(str(folder), **exact, kv_cache_memory=0.1, max_model_len=1024) for folder in folders]


def number_of(version):
    """Updates are numbered, and odd ones bring the second weights."""
    return 0 if version == "default" else int(version)


def params_of(i, num_tokens):
    return SamplingParams(max_tokens=num_tokens, temperature=0.8 * (i % 2), ignore_eos=True, seed=i)


class Clients:
    """Send requests, one after another each, until the test has ended its phase."""

    def __init__(self, link):
        self._link, self._are_ending = link, False
        self.num_tokens = 0  # received
        self.answers = []  # number of the prompt, tokens, versions
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(len(PROMPTS))]

    async def _run(self, i):
        while not self._are_ending:
            name, tokens, prompt = f"{i}-{len(self.answers)}", [], PROMPTS[i]
            request = Request(name, prompt, len(prompt), params_of(i, NUM_TOKENS), seed=i, cache_salt=name)
            async for output in self._link.generate(request):
                assert not output.error, output.error
                tokens += output.token_ids
                self.num_tokens += len(output.token_ids)
            self.answers.append((i, tokens, list(output.weight_versions)))

    async def received(self, more):
        """Wait for this many more tokens of all streams together."""
        wanted = self.num_tokens + more
        await until(lambda: self.num_tokens >= wanted or any(task.done() for task in self._tasks))

    async def end(self):
        self._are_ending = True
        async with asyncio.timeout(IN_TIME_S):
            await asyncio.gather(*self._tasks)

    def check(self, models):
        """Compute each span again with the weights of its version. Returns the numbers of the versions."""
        spans = []
        for i, tokens, versions in self.answers:
            assert len(tokens) == NUM_TOKENS
            ends = [*(start for start, _ in versions[1:]), len(tokens)]
            spans += [(i, tokens, start, end, number_of(v)) for (start, v), end in zip(versions, ends, strict=True)]
        for parity, model in enumerate(models):
            own = [span for span in spans if span[4] % 2 == parity]
            prompts = [[*PROMPTS[i], *tokens[:start]] for i, tokens, start, _, _ in own]
            found = model.generate(prompts, [params_of(i, end - start) for i, _, start, end, _ in own])
            for (i, tokens, start, end, version), answer in zip(own, found, strict=True):
                assert tokens[start:end] == answer.token_ids, (i, start, version)
        return {version for *_, version in spans}


async def until(condition):
    async with asyncio.timeout(IN_TIME_S):
        while not condition():
            await asyncio.sleep(0.01)


@ray.remote(num_cpus=0, max_concurrency=4)  # both ranks ask it at once
class HungTrainer:
    """Is asked for its weights, and never answers."""

    def __init__(self):
        self.is_asked = False

    async def weights(self, slices):
        self.is_asked = True
        await asyncio.Event().wait()

    async def was_asked(self):
        return self.is_asked


class Trained:
    """A server, and the updates that the test sends to it."""

    def __init__(self, server, folders, store):
        self.server, self.folders, self.store = server, folders, store
        self.number = 0  # of the last update

    async def call(self, call):
        (answer,) = (await self.server.link.weights(call)).values()
        return answer

    async def begin(self):
        """Start the next update, and stage its weights."""
        self.number += 1
        await self.call(Start())
        await self.call(Receive([FilesPart([str(self.folders[self.number % 2])])]))

    async def finish(self, **more):
        return await self.call(Finish(str(self.number), **more))

    async def update(self):
        """Update until one succeeds, as a trainer does that has lost its engine."""
        async with asyncio.timeout(IN_TIME_S):
            while True:
                try:
                    await self.begin()
                    return await self.finish(wait_stored=True)
                except WeightsRefused:
                    await asyncio.sleep(0.1)

    async def version(self):
        """The number of the version, when an engine serves again."""
        async with asyncio.timeout(IN_TIME_S):
            while True:
                try:
                    return number_of((await self.call(GetState())).version)
                except WeightsRefused:
                    await asyncio.sleep(0.1)

    async def kill(self, role, rank=0):
        """Returns when the process has ended. Those that an earlier death has left end first."""

        def pids():
            return [process.pid for process in processes_of("", self.server.name) if process.role == role]

        await until(lambda: len(pids()) == (2 if role == "runner" else 1))
        pid = pids()[rank]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: has_ended(pid))

    @contextmanager
    def store_locked(self):
        """No rank can store anything meanwhile."""
        with (self.store / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(ray_session, folders, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    changed = {"tensor_parallel_size": 2, "rank_invariant": True, "weight_updates": True, "weight_store": str(store)}
    async with Server("update-faults", folders[0], **changed) as server:
        yield Trained(server, folders, store)


async def die_in_receive(trained):
    """A rank dies while both wait for the trainer's tensors."""
    trainer = HungTrainer.remote()
    infos = [TensorInfo(*each) for each in weight_list(load_file(next(trained.folders[1].glob("*.safetensors"))))]
    await trained.call(Start())
    updating = asyncio.create_task(trained.call(Receive([ActorPart(trainer, "weights", infos)])))
    async with asyncio.timeout(IN_TIME_S):
        while not await trainer.was_asked.remote():
            await asyncio.sleep(0.01)
    await trained.kill("runner", rank=1)
    with pytest.raises(WeightsRefused) as refusal:
        await updating
    assert refusal.value.code == "unavailable"
    ray.kill(trainer)


async def die_when_staged(trained):
    """The engine dies when all tensors have arrived."""
    await trained.begin()
    await trained.kill("engine")
    with pytest.raises(WeightsRefused):
        await trained.finish()


async def die_before_store(trained):
    """A rank dies when steps run with the new weights, which no restarted rank could read."""
    await trained.begin()
    with trained.store_locked():
        answer = await trained.finish()
        assert (number_of(answer.version), answer.stored) == (trained.number, False)
        await trained.clients.received(20)
        await trained.kill("runner", rank=0)


async def die_after_store(trained):
    await trained.begin()
    assert (await trained.finish(wait_stored=True)).stored
    await trained.kill("runner", rank=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("die", "applies", "returns"),  # whether streams get the new weights, and whether restarted processes do
    [
        (die_in_receive, False, False),
        (die_when_staged, False, False),
        (die_before_store, True, False),
        (die_after_store, True, True),
    ],
)
async def test_each_token_has_one_version(trained, models, die, applies, returns):
    await trained.update()  # so that there is a store
    before = trained.number
    trained.clients = clients = Clients(trained.server.link)
    await clients.received(20)
    await die(trained)
    during = trained.number
    async with asyncio.timeout(IN_TIME_S):
        while await trained.version() != (during if returns else before):
            await asyncio.sleep(0.05)  # the engine has not noticed the death
    await clients.received(20)
    await trained.update()
    await clients.received(20)
    await clients.end()
    assert clients.check(models) == {before, trained.number} | ({during} if applies else set())
