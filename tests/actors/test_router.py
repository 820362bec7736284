"""The choice among engines: by their caches and loads, equal on all fronts, without herding."""

import dataclasses
import random
from collections import Counter
from itertools import chain

import pytest

from actors.front.router import Prompt, Router
from actors.wire.link_messages import CacheUpdate
from runtime.base.images import Image, ImageSpan
from runtime.base.model_info import ModelInfo
from runtime.policy.engine_load import EngineLoad

INFO = ModelInfo("f", 320, 512, (0,), 100, 4, "none", "none")
KIND = (INFO.fingerprint, INFO.block_size)
NAMES = ["a", "b", "c", "d"]


def router_of(*names, policy="prefix", info=INFO):
    router = Router(policy)
    for name in names:
        router.add(name, info)
        tell(router, name)
    return router


def packed(prompts, kind=KIND):
    keys = [key for prompt in prompts for key in list(chain(*prompt.keys(kind)))[: prompt.num_hits(kind)]]
    return b"".join(key.to_bytes(8, "little", signed=True) for key in keys)


def tell(router, engine, *prompts, queued=0, running=0, last_stream=0, kind=KIND):
    """The engine holds only these prompts' full blocks."""
    load = EngineLoad(queued, running, 0, 50, 99)
    return router.apply(engine, CacheUpdate(0, packed(prompts, kind), b"", load, True, last_stream))


def prompt(kind, length=41, salt=""):
    return Prompt([kind * 40 + i % 37 for i in range(length)], salt)


def test_a_second_turn_goes_to_the_engine_of_the_first():
    router = router_of(*NAMES)
    tell(router, "c", prompt(1))
    second = prompt(1).continued([7] * 30)
    assert router.choose(second) == ("c", 40)
    assert router.choose(second, ["a", "b"])[1] == 0


def test_an_overloaded_engine_is_left_despite_its_prefix():
    router = router_of("a", "b")
    tell(router, "a", prompt(1, 101), running=3)
    asked = prompt(1, 101)  # a: (100 - 96 + 1) x 4; b: (101 + 1) x 1
    assert router.choose(asked) == ("a", 100)
    tell(router, "a", prompt(1, 101), running=3, queued=50)
    assert router.choose(asked) == ("b", 0)


def test_within_the_slack_the_longest_prefix_wins():
    router = router_of("a", "b", "c")
    tell(router, "a", prompt(1, 17), queued=30)
    tell(router, "b", prompt(1, 13), queued=20)
    asked = prompt(1, 101)  # a: 30 + 85 + 1; b: 20 + 89 + 1; c: 102
    assert router.choose(asked) == ("a", 16)


def test_salts_keep_tenants_apart():
    router = router_of("a", "b")
    tell(router, "a", prompt(1, salt="one"))
    assert router.choose(prompt(1, salt="one")) == ("a", 40)
    assert router.choose(prompt(1, salt="two")).num_cached == 0
    assert router.choose(prompt(1)).num_cached == 0


def test_engines_of_another_kind_have_other_hashes():
    """While a new version of a model is rolled out, and with another block size."""
    router = router_of("a")
    others = {"b": ModelInfo("g", 320, 512, (0,), 100, 4, "none", "none"), "c": INFO}
    others["d"] = ModelInfo("f", 320, 512, (0,), 100, 8, "none", "none")
    for name, info in others.items():
        router.add(name, info)
    tell(router, "b", prompt(1, 17), kind=("g", 4))
    tell(router, "d", prompt(1, 33), kind=("f", 8))
    tell(router, "a", prompt(2))
    assert router.choose(prompt(1)) == ("d", 32)
    assert router.choose(prompt(1), ["a", "b", "c"]) == ("b", 16)
    assert router.choose(prompt(2)) == ("a", 40)


def test_new_prefixes_spread_and_fronts_agree():
    """Whatever order they learned of the engines in."""
    fronts = [router_of(*NAMES), router_of(*reversed(NAMES)), router_of("x", *NAMES)]
    fronts[2].remove("x")
    choices = [[front.choose(prompt(kind)).engine for kind in range(200)] for front in fronts]
    assert choices[0] == choices[1] == choices[2]
    assert min(Counter(choices[0]).values()) > 25
    short = [[front.choose(Prompt([kind])).engine for kind in range(200)] for front in fronts]
    assert short[0] == short[1] == short[2]
    assert min(Counter(short[0]).values()) > 25


def test_a_leaving_engine_moves_only_its_own_prefixes():
    router = router_of(*NAMES)
    before = [router.choose(prompt(kind)).engine for kind in range(100)]
    router.remove("b")
    after = [router.choose(prompt(kind)).engine for kind in range(100)]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "b")
    assert len({new for old, new in zip(before, after, strict=True) if old == "b"}) == 3


def test_a_common_prefix_does_not_overload_one_engine():
    """All engines hold it, and the tokens after it spread them."""
    router = router_of(*NAMES)
    for name in NAMES:
        tell(router, name, prompt(1))
    chosen = Counter(router.choose(prompt(1).continued([kind, 3, 4, 5, 6])).engine for kind in range(200))
    assert min(chosen.values()) > 25


def test_own_choices_count_until_the_engine_reports_them():
    router = router_of(*NAMES)
    chosen = []
    for stream in range(1, 9):
        engine, num_cached = router.choose(prompt(stream))
        router.note_sent(engine, stream, 41 - num_cached)
        chosen.append(engine)
    assert set(Counter(chosen).values()) == {2}
    for name in NAMES[1:]:
        assert tell(router, name, last_stream=8, queued=400, running=2)
    tell(router, "a", last_stream=0)  # an update that was made before it got them
    router.note_sent("a", 9, 1000)
    assert router.choose(prompt(20)).engine != "a"
    tell(router, "a", last_stream=9)
    assert router.choose(prompt(20)).engine == "a"


def test_a_gap_in_the_feed_needs_a_new_snapshot():
    router = router_of("a", "b")
    tell(router, "a", prompt(1))
    assert router.choose(prompt(1)).num_cached == 40
    assert not router.apply("a", CacheUpdate(2, b"", b"", EngineLoad(9)))
    assert router.held("a") is None
    assert router.choose(prompt(1)).num_cached == 0
    assert not router.apply("a", CacheUpdate(3, b"", b"", EngineLoad()))
    assert tell(router, "a", prompt(1))
    assert router.apply("a", CacheUpdate(1, packed([prompt(2)]), packed([prompt(1, 13)]), EngineLoad()))
    assert router.choose(prompt(2)) == ("a", 40)
    assert router.choose(prompt(1)).num_cached == 0


def test_a_replacement_engine_starts_with_an_empty_cache():
    router = router_of("a", "b")
    tell(router, "a", prompt(1))
    router.remove("a")
    assert router.choose(prompt(1)) == ("b", 0)
    router.add("c", INFO)
    assert router.choose(prompt(1)).num_cached == 0
    tell(router, "c", prompt(2))
    assert (router.choose(prompt(1)).num_cached, router.choose(prompt(2))) == (0, ("c", 40))


@pytest.mark.parametrize("seed", range(5))
def test_routing_scales_to_many_engines_and_long_prefixes(seed):
    """More engines than bits of a machine word, each with some share of the prompt; blocks are found by halving."""
    rng = random.Random(seed)
    lengths = list(range(100)) if seed == 0 else [rng.choice((0, 1, 7, 8, 9, rng.randrange(150))) for _ in range(100)]
    names = [f"e{i}" for i in range(100)]
    router, long = router_of(*names), prompt(1, 4 * rng.randrange(100, 150) + 1)
    for name, length in zip(names, lengths, strict=True):
        tell(router, name, prompt(1, 4 * length + 1))
    cached, first_key = router._cached_tokens(long, router._find_all().bits)
    keys = list(chain(*long.keys(KIND)))
    assert cached.tolist() == [4 * min(length, len(keys) - 1) for length in lengths]
    assert first_key == keys[min(max(lengths), len(keys) - 1)]
    assert router.choose(long).num_cached == max(cached)


def documents(count, length=9, **kw):
    """Prompts of a reranker: ten blocks and one token of a query, and a document."""
    return [Prompt([*prompt(1).token_ids, *[200 + i] * length], colocate=True, **kw) for i in range(count)]


def send(router, prompts):
    """The choices for prompts that are sent before any engine has reported one."""
    choices = []
    for stream, asked in enumerate(prompts, start=1):
        choices.append(router.choose(asked))
        router.note_sent(choices[-1].engine, stream, len(asked.token_ids) - choices[-1].num_cached, asked)
    return choices


def with_image(number, begin=10, length=21, **kw):
    """A prompt with one of several images at the same tokens."""
    image = Image(bytes([number]) * 16, ((2, 2),), b"pixels")
    return Prompt(prompt(1).token_ids, images=[ImageSpan(begin, length, image)], **kw)


def test_prompts_with_other_images_share_the_text_before():
    router = router_of(*NAMES)
    tell(router, "c", with_image(1))
    assert router.choose(with_image(1)) == ("c", 40)
    for other in (with_image(2), with_image(1, begin=9), with_image(1, begin=11), prompt(1)):
        assert router.choose(other) == ("c", 8)
    assert router.choose(with_image(1).continued([7] * 9)).num_cached == 40
    more = with_image(1)
    more.images.append(ImageSpan(33, 2, Image(bytes(16), ())))
    for other, shared in ((with_image(2), 8), (prompt(1), 8), (more, 32), (with_image(1), 40)):
        assert with_image(1).num_shared(other, KIND) == other.num_shared(with_image(1), KIND) == shared


def test_documents_of_one_query_follow_the_first_of_them():
    router = router_of(*NAMES)
    first, *others = send(router, documents(40))
    assert first.num_cached == 0
    assert set(others) == {(first.engine, 40)}
    assert router._tokens.max() == 50 + 39 * 10
    for plain in ({"salt": "another"}, {"uses_cache": False}):
        assert router.choose(*documents(1, **plain)).engine != first.engine
    assert router.choose(prompt(1)).engine != first.engine, "a prompt of text does not wait for others"


@pytest.mark.parametrize(
    ("limits", "most"), [({"max_num_batched_tokens": 100}, 6), ({"max_num_batched_tokens": 800, "max_num_seqs": 5}, 5)]
)
def test_documents_spread_once_an_engine_has_a_full_step(limits, most):
    router = router_of(*NAMES, info=dataclasses.replace(INFO, **limits))
    choices = send(router, documents(3 * most))
    assert sorted(Counter(choice.engine for choice in choices).values()) == [most] * 3
    assert [choice.num_cached for choice in choices] == ([0] + [40] * (most - 1)) * 3
    assert send(router, documents(40))[-1].num_cached == 40, "and everywhere when all have"


def test_documents_follow_only_unreported_live_choices():
    router, names = router_of(*NAMES), []
    for forget in (router.remove, lambda name: tell(router, name, last_stream=99, queued=300)):
        (first,) = send(router, documents(1))
        names.append(first.engine)
        forget(first.engine)
        (other,) = send(router, documents(1))
        assert other.engine not in names
        assert other.num_cached == 0
        tell(router, other.engine, last_stream=99)
    assert router._colocated == {}


@pytest.mark.parametrize("policy", ["round-robin", "least-load"])
def test_policies_without_the_cache(policy):
    router = router_of(*NAMES, policy=policy)
    tell(router, "b", prompt(1))
    chosen = []
    for stream in range(1, 9):
        choice = router.choose(prompt(1))
        router.note_sent(choice.engine, stream, 41)
        chosen.append(choice.engine)
        assert choice.num_cached == 0
    assert set(Counter(chosen).values()) == {2}
    tell(router, "c", running=9)
    busy = [router.choose(prompt(1)).engine for _ in range(8)]
    assert ("c" in busy) == (policy == "round-robin")


# ---- sessions --------------------------------------------------------------------------------------------------------


def of_session(name, kind, length=41):
    return Prompt(prompt(kind, length).token_ids, session=name)


def test_a_session_keeps_its_engine_and_fronts_agree():
    """Its prompts share no prefix that an engine holds: a title, a subagent, or a turn after an eviction."""
    fronts = [router_of(*NAMES), router_of(*reversed(NAMES))]
    homes = []
    for session in range(200):
        asked = [of_session(f"session {session}", 10 * session + i) for i in range(5)]
        (home,) = {front.choose(each).engine for front in fronts for each in asked}
        homes.append(home)
    assert min(Counter(homes).values()) > 25
    without = {fronts[0].choose(prompt(i)).engine for i in range(5)}
    assert len(without) > 1


def test_prefixes_and_load_come_before_a_session():
    router = router_of(*NAMES)
    asked = of_session("s", 1)
    home = router.choose(asked).engine
    other = next(name for name in NAMES if name != home)
    tell(router, other, prompt(1))
    assert router.choose(asked) == (other, 40)
    tell(router, other)
    tell(router, home, running=1, queued=100)
    assert router.choose(asked).engine != home
    tell(router, home)
    assert router.choose(asked).engine == home


def test_sessions_visit_fewer_engines_than_prefixes_do():
    """A simulation: 50 sessions, compacted after each second turn, on two fronts and engines that keep 4 prompts."""
    rng = random.Random(0)

    def num_engines(named):
        fronts, last, visits = [router_of(*NAMES) for _ in range(2)], {name: [] for name in NAMES}, {}
        turns = [session for session in range(50) for _ in range(6)]
        rng.shuffle(turns)
        for turn, session in enumerate(turns):
            num_before = len(visits.setdefault(session, []))
            token_ids = prompt(10 * session + num_before // 2, 41 + 8 * num_before).token_ids
            asked = Prompt(token_ids, session=f"s{session}" if named else "")
            engine = fronts[turn % 2].choose(asked).engine
            visits[session].append(engine)
            last[engine] = [*last[engine], asked][-4:]
            for front in fronts:
                tell(front, engine, *last[engine])
        return sum(len(set(engines)) for engines in visits.values())

    assert num_engines(True) == 50
    assert num_engines(False) > 100
