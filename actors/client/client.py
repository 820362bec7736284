"""RolloutClient: an application's engines for another job in the same Ray.

The client is itself a front (actors/front): it opens a socket to each engine and sends token ids. An engine sends
it one frame a step for all its streams. So tokens use neither HTTP nor Ray calls, and streams outlive engines (C8)."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from msgspec import to_builtins

from actors.client.batch import Batch, BatchEnd, Job, Results
from actors.client.engines import OneModelDirectory, RolloutGroup, find_engines
from actors.client.join import join_ray
from actors.client.loop_thread import LoopThread
from actors.client.rollout import Rollout
from actors.client.weight_sources import Source, Transport, parts_of
from actors.wire.weight_calls import A, Discard, Finish, GetState, Pause, Receive, Resume, Start, WeightCall
from runtime.base.model_info import ModelInfo
from runtime.base.plain_values import integer, integers, is_integer, text
from runtime.base.reports import Experts, PromptScores, one_of
from runtime.base.types import CallboardError, Request, RequestOutput, SamplingParams
from runtime.core.requests import SEED_MASK, requests_of

Prompt = Sequence[int]

_SETTLED_S = 5.0  # wait for the Status with new weights, which an engine sends before its answer
_POLL_S = 0.001
_NEW_ENGINE_S = 5.0  # until a new engine is found; no front announces it here
_MISSING = object()


class RolloutOptions(TypedDict, total=False):
    """Options of `generate` and its relatives."""

    n: int  # choices of each prompt; default: 1
    # The seed of each prompt's first choice. A number gives each prompt its own seed. Default: params.seed for all
    # prompts, or random ones.
    seeds: int | Iterable[int]
    max_in_flight: int  # requests in the engines at once; default: what they compute at once and a fourth more
    max_unread: int  # rollouts that wait for the caller before no more requests are sent; default: 4 * max_in_flight
    min_weight_version: str | int  # requests wait for engines with this weight version or a newer one
    adapter: str  # a name that the application serves; default: the model itself
    cache_salt: str  # requests share cached blocks only under the same salt
    priority: int  # lower is served first; default: 0


class RolloutClient:
    """Generates, scores and updates weights on all engines of an application. Any thread may call its methods.

    It belongs to its process: each process connects its own."""

    def __init__(self, group: RolloutGroup, thread: LoopThread) -> None:
        self._group, self._thread = group, thread
        atexit.register(self.close)

    @classmethod
    def connect(cls, application: str | None = None, *, timeout_s: float = 300.0) -> RolloutClient:
        """Connect to the engines of an application, and wait until one has loaded its model.

        `application` is its name in Ray Serve; None stands for the only one in this Ray. Raises CallboardError after
        the timeout, or if several applications could be meant."""
        join_ray()
        directory = OneModelDirectory(find_engines(application, timeout_s), _NEW_ENGINE_S)
        thread = LoopThread("callboard-client")
        try:
            return cls(thread.call(_started(directory, timeout_s)), thread)
        except BaseException:
            thread.close()
            raise

    def close(self) -> None:
        """End all calls, and disconnect. The engines abort what still runs."""
        atexit.unregister(self.close)
        with suppress(RuntimeError):  # the loop has ended
            self._thread.loop.call_soon_threadsafe(self._group.close)
        self._thread.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise CallboardError("A RolloutClient cannot be sent to another process; call RolloutClient.connect there.")

    @property
    def info(self) -> ModelInfo:
        """The model: vocabulary, context, dtype, and the version of its weights."""
        return self._group.info

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, **options: Unpack[RolloutOptions]
    ) -> Results[Rollout]:
        """Start rollouts of prompts (token ids), and return an iterator that yields each when it ends.

        The engines begin at once. A helper thread reads the prompts as others end, so the iterable may be endless. A
        request that fails is a Rollout with an error, and the others continue. `close` of the iterator aborts them."""
        batch = self._batch(prompts, params or SamplingParams(), **options)
        return Results(self._thread, batch)

    def generate_list(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, **options: Unpack[RolloutOptions]
    ) -> list[Rollout]:
        """Return the prompts' rollouts, in the order of prompts and choices."""
        return sorted(self.generate(prompts, params, **options), key=lambda r: (r.index, r.choice))

    def generate_groups(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, **options: Unpack[RolloutOptions]
    ) -> Iterator[list[Rollout]]:
        """Yield each prompt's `n` rollouts in the order of their choices, when the last has ended."""
        groups: dict[int, list[Rollout]] = {}
        for rollout in self.generate(prompts, params, **options):
            group = groups.setdefault(rollout.index, [])
            group.append(rollout)
            if len(group) == options.get("n", 1):
                yield sorted(groups.pop(rollout.index), key=lambda r: r.choice)

    async def stream(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, **options: Unpack[RolloutOptions]
    ) -> AsyncIterator[Rollout]:
        """Yield the rollouts of `generate` to a caller on its own event loop."""
        batch = self._batch(prompts, params or SamplingParams(), **options)
        items: asyncio.Queue[Rollout | BatchEnd] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        running = batch.start(self._thread, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        try:
            while not isinstance(item := await items.get(), BatchEnd):
                batch.num_read += 1
                if batch.waits_for_reader:
                    self._thread.loop.call_soon_threadsafe(batch.wake)
                yield item
            if item.error is not None:
                raise item.error
        finally:
            with suppress(RuntimeError):  # the client was closed
                running.cancel()

    def score(
        self,
        sequences: Iterable[Prompt],
        prompt_lens: Iterable[int] | None = None,
        *,
        adapter: str = "",
        max_in_flight: int | None = None,
    ) -> list[list[float]]:
        """Return the log-probability of each sequence's tokens after the first one.

        `prompt_lens` has each prompt's length. Tokens after it are computed as when they were sampled, so that
        their log-probabilities have the same bits in deterministic mode. Raises CallboardError if a sequence cannot be
        scored."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        jobs = self._jobs(sequences, params, adapter=adapter, prompt_lens=prompt_lens)
        results = Results(self._thread, Batch(self._group, jobs, _scores_of, max_in_flight, None))
        scores: dict[int, list[float]] = {}
        for index, found, error in results:
            if error:
                results.close()
                raise CallboardError(f"Sequence {index} cannot be scored: {error}")
            scores[index] = found
        return [scores[index] for index in sorted(scores)]

    def _batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams,
        max_in_flight: int | None = None,
        max_unread: int | None = None,
        **options: Any,
    ) -> Batch[Rollout]:
        return Batch(self._group, self._jobs(prompts, params, **options), _rollout_of, max_in_flight, max_unread)

    def _jobs(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams,
        n: int = 1,
        seeds: int | Iterable[int] | None = None,
        min_weight_version: str | int = "",
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
        prompt_lens: Iterable[int] | None = None,
    ) -> Iterator[list[Job]]:
        """Check what all requests share, and return the jobs of each prompt."""
        if not isinstance(params, SamplingParams):
            raise CallboardError(f"params is a {type(params).__name__}; it must be SamplingParams.")
        n, priority = integer(n, "n", 1), integer(priority, "priority")
        cache_salt, adapter = text(cache_salt, "cache_salt"), text(adapter, "adapter")
        version, info = _version_name(min_weight_version, "min_weight_version"), self.info
        if version and info.weights is None:
            what = f"min_weight_version is {version!r}, but the weights of this application never change"
            raise CallboardError(f"{what}; leave it out, or start the server with --weight-updates.")
        served = self._group.adapters.served() if adapter else {}
        if adapter and adapter not in served:
            names = ", ".join(map(repr, served)) or "none"
            raise CallboardError(f"The application has no adapter {adapter!r}; it has {names}.")
        digest = served[adapter].digest if adapter else ""
        shared = Request("", [], 0, params, 0, priority, cache_salt, digest, min_weight_version=version)
        batch = secrets.token_hex(6)
        each_seed: Any = _derived_seeds(integer(seeds, "seeds")) if is_integer(seeds) else seeds
        given = _aligned(prompts, seeds=each_seed, prompt_lens=prompt_lens)

        def jobs() -> Iterator[list[Job]]:
            for index, (prompt, seed, prompt_len) in enumerate(given):
                names = (f"rollout-{batch}.{index}-{choice}" for choice in range(n))
                prompt_params = params if seed is None else replace(params, seed=seed)
                token_ids, error = _checked(prompt, info)
                length = len(token_ids)
                if prompt_len is not None and not error:
                    length = integer(prompt_len, f"prompt_lens[{index}]", 1, length)
                request = replace(shared, token_ids=token_ids, prompt_len=length, params=prompt_params)
                yield [Job(each, index, i, error) for i, each in enumerate(requests_of(request, names, n))]

        return jobs()

    # ---- weights --------------------------------------------------------------------------------------------------

    def pause(
        self,
        mode: Literal["keep", "wait", "abort"] = "keep",
        *,
        kv: Literal["recompute", "keep"] = "recompute",
        lease_s: float | None = None,
    ) -> None:
        """Hold all requests of the engines, wait for their end, or abort them; then no step runs until `resume`.

        `kv`: what happens to held requests' keys and values if the weights change meanwhile. After `lease_s` seconds
        without a call about weights the pause ends; None for --trainer-timeout-s."""
        self._weights(Pause(mode=mode, kv=kv, lease_s=lease_s))

    def resume(self) -> None:
        """Run steps again."""
        self._weights(Resume())

    def weights_info(self) -> dict[str, Any]:
        """Return by engine whether it is paused, the version of its weights, and whether the store has that."""
        return {engine: to_builtins(state) for engine, state in self._weights(GetState()).items()}

    def update_weights(
        self,
        source: Source,
        version: str | int | None = None,
        *,
        kv: Literal["recompute", "keep"] | None = None,
        wait_stored: bool = False,
        transport: Transport = "objects",
        method: str = "weights",
        tensors: Iterable[tuple[str, str, Sequence[int]]] | None = None,
    ) -> str:
        """Replace weights on all engines or on none, and return the new version's name.

        Steps continue while the tensors travel. Then running requests continue with the new weights.

        Args:

            source       a state dict, an ObjectRef of one or a list of these, an actor, or a safetensors path on
                         the engines' nodes; the model's other tensors keep their values
            version      its name; None for the number of updates so far
            kv           "recompute" or "keep" running requests' keys and values; None for the choice of `pause`
            wait_stored  return when restarted engines would have the version, too
            transport    a state dict's: "ipc" if its tensors are on the GPU of the engine's only rank
            method       an actor's: gets a list of slices, and returns their tensors
            tensors      an actor's: (name, dtype, shape) each; None to call its method `weight_list`"""
        name = None if version is None else _version_name(version, "version")
        start = Start()
        self._weights(start)
        try:
            for part in parts_of(source, transport, method, tensors):
                self._weights(Receive([part]))
            answers = self._weights(Finish(name, wait_stored, kv))
        except BaseException:
            with suppress(CallboardError):  # engines without an update
                self._weights(Discard(start.update_id))
            raise
        serial, new = max((state.serial, state.version) for state in answers.values())
        self._thread.call(_settled(self._group, serial))
        return new

    def load_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter (LoRA) that PEFT has written to a folder on all nodes, in place of the one with this name.

        Other requests are not affected. Raises CallboardError if an engine cannot load it: then none serves it."""
        self._thread.call(self._group.adapters.load(name, folder))

    def _weights(self, call: WeightCall[A]) -> dict[str, A]:
        return self._thread.call(self._group.weights(call))


async def _started(directory: OneModelDirectory, timeout_s: float) -> RolloutGroup:
    group = RolloutGroup(directory)
    directory.on_replaced = group.end
    try:
        async with asyncio.timeout(timeout_s):
            await group.start()
    except BaseException as e:
        group.close()
        if isinstance(e, TimeoutError):
            raise CallboardError(f"No engine can serve within {timeout_s:g} s: {group.health()}") from None
        raise
    return group


async def _settled(group: RolloutGroup, serial: int) -> None:
    """Wait until the links have the version that their engines reported. Later requests then name it from the start."""
    end = time.monotonic() + _SETTLED_S
    while group.least_serial < serial and time.monotonic() < end:
        await asyncio.sleep(_POLL_S)


def _version_name(version: str | int, field: str) -> str:
    return str(integer(version, field)) if is_integer(version) else text(version, field)


def _aligned(prompts: Iterable[Any], **lists: Iterable[Any] | None) -> Iterator[tuple[Any, ...]]:
    """Return an iterator over each prompt with its integer from each list, or with None.

    Raises CallboardError at once for lists that differ from the prompts in length, and the iterator when an iterable
    ends before them."""
    for field, values in (("prompts", prompts), *lists.items()):
        if values is not None and not isinstance(values, Iterable):
            raise CallboardError(f"{field} is {values!r}; it must be a list or another iterable.")
        if isinstance(values, Sized) and isinstance(prompts, Sized) and len(values) != len(prompts):
            raise _unequal(len(prompts), field, len(values))
    iterators = {field: None if values is None else iter(values) for field, values in lists.items()}

    def rows() -> Iterator[tuple[Any, ...]]:
        num = 0
        for prompt in prompts:
            row = [prompt]
            for field, rest in iterators.items():
                if (value := None if rest is None else next(rest, _MISSING)) is _MISSING:
                    raise _unequal(num + 1, field, num)
                row.append(None if rest is None else integer(value, f"{field}[{num}]"))
            yield tuple(row)
            num += 1
        for field, values in lists.items():
            if isinstance(values, Sized) and len(values) != num:
                raise _unequal(num, field, len(values))

    return rows()


def _unequal(num_prompts: int, field: str, num: int) -> CallboardError:
    return CallboardError(f"There are {num_prompts} prompts and {num} {field}; send as many.")


def _derived_seeds(seed: int) -> Iterator[int]:
    index = 0
    while True:
        digest = hashlib.blake2b(b"prompt %d/%d" % (seed, index), digest_size=8).digest()
        yield int.from_bytes(digest, "little") & SEED_MASK
        index += 1


def _checked(prompt: Prompt, info: ModelInfo) -> tuple[list[int], str]:
    """Return the token ids of a prompt, and why it cannot be sent; the reason is empty if it can."""
    try:
        token_ids = integers(prompt, "The prompt")
    except Exception as e:  # or what its own iterator raises
        return [], str(e) if isinstance(e, CallboardError) else f"The prompt cannot be read: {type(e).__name__}: {e}"
    if not token_ids:
        return token_ids, "The prompt has no tokens; give it at least one."
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < info.vocab_size)
        return token_ids, f"The prompt has the token id {wrong}; ids must be from 0 to {info.vocab_size - 1}."
    return token_ids, ""


def _rollout_of(job: Job, output: RequestOutput) -> Rollout:
    request, experts = job.request, one_of(output.reports, Experts)
    return Rollout(
        job.prompt_index,
        job.choice,
        request.token_ids,
        request.seed,
        output.token_ids,
        output.finish_reason,
        output.stop_token_id,
        output.logprobs,
        output.weight_versions,
        None if experts is None else experts.ids,
        output.num_cached,
        output.error,
    )


def _scores_of(job: Job, output: RequestOutput) -> tuple[int, list[float], str]:
    scores = one_of(output.reports, PromptScores)
    logprobs = [] if scores is None else np.frombuffer(scores.logprobs, np.float32).tolist()
    return job.prompt_index, logprobs, output.error
