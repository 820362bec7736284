"""Top-k, top-p and min-p sampling as one kernel, which decode graphs capture.

`top_k_top_p.py` defines the surviving tokens. The kernel computes only what the answer depends on:

- **Top-p and min-p.** The candidate is the token with the best score. It survives if less than `top_p` of the
  probability lies above its logit. One sum over the tiles with such tokens decides that, unless these tiles' known mass
  suffices. If the candidate does not survive, neither does any token with at most its logit. The best score
  among the others is the next candidate. This is the rejection sampling of FlashInfer (arXiv 2501.01005) without
  chance, because noise is a function of position and token id.
- **Levels.** The same pass sums the mass above a few levels over the candidate. These sums exclude more tokens, or
  prove that others survive, so the next candidate rarely needs a pass. It is again the best among the tiles' best
  scores, and only tiles that lost their best token are scored again.
- **Top-k.** Take the best logit in each group of 128 tokens. At least k tokens reach the k-th best of these logits. The
  kernel gathers the tokens that reach it and compares them with each other. If they are too many, it finds the k-th
  best logit four bits at a time, and continues as above.

A row's programs share its tiles, wait for each other between phases, and draw the same conclusions from shared
results. Sums of probabilities always cover whole tiles in one order. A row's answer therefore depends neither on other
rows nor on the number of programs.
"""

from __future__ import annotations

from runtime.kernels.sampling.gumbel import noise_of_tokens
from runtime.kernels.sampling.token_keys import (
    float_of,
    is_filtered,
    key_of,
    load_float,
    mass_of,
    packed,
    token_of,
    write_token,
)
from runtime.kernels.triton_language import ROW_ARRAYS, jit, tl


@jit
def _logits_of(logits_ptr, rows_ptr, row, logits_stride, FORM: tl.constexpr):
    """A pointer to the row's logits."""
    if FORM.indexed:
        row = tl.load(rows_ptr + row).to(tl.int64)
    return logits_ptr + row * logits_stride


@jit
def _best_of_tiles(keys_ptr, num_tiles, FORM: tl.constexpr):
    """The best of a row's packed keys; all keys are above -FAILED."""
    tiles = tl.arange(0, FORM.tiles)
    return tl.max(tl.load(keys_ptr + tiles, mask=tiles < num_tiles, other=-FORM.failed, cache_modifier=".cg"), axis=0)


@jit
def _digit(counts, wanted):
    """The largest digit i with counts[i] >= wanted; `counts` [16] never rise."""
    return tl.maximum(tl.sum((counts >= wanted).to(tl.int32), axis=0) - 1, 0)


@jit
def _top_k_floor(groups_ptr, num_groups, top_k, GROUPS: tl.constexpr):
    """A key that at least top_k group keys reach, exact in its upper half, and above -inf's key.

    If fewer keys are above -inf's, they all reach it."""
    at = tl.arange(0, GROUPS)
    keys = tl.load(groups_ptr + at, mask=at < num_groups, other=-2147483648)
    floor = tl.full([], -2147483648, tl.int32)
    for i in range(16):
        level = floor ^ (tl.full([], 1, tl.int32) << (31 - i))
        floor = tl.where(tl.sum((keys >= level).to(tl.int32), axis=0) >= top_k, level, floor)
    return tl.maximum(floor, -2139095040)


@jit
def _kth_bits(counters_ptr, top_k, num_digits):
    """The upper 4 * num_digits bits of the k-th best key, from the counts at each digit's levels."""
    threshold = tl.full([], -2147483648, tl.int32)
    for i in range(num_digits):
        counts = tl.load(counters_ptr + 2 + 16 * i + tl.arange(0, 16), cache_modifier=".cg")
        threshold += _digit(counts, top_k) << (28 - 4 * i)
    return threshold


@jit
def _fixed_point(mass):
    """mass in units of 2^-40: integer sums do not depend on the gathered tokens' order."""
    return (mass * 1099511627776.0).to(tl.int64)


@jit
def _best_of_gathered(kept_ptr, num, top_k, top_p, floor, best, temperature, position, low, high, FEW: tl.constexpr):
    """The packed key of the surviving token with the best score among `num` gathered tokens [2, FEW] (keys, ids)."""
    at = tl.arange(0, FEW)
    keys = tl.load(kept_ptr + at, mask=at < num, other=-2139095041, cache_modifier=".cg")
    ids = tl.load(kept_ptr + FEW + at, mask=at < num, other=0, cache_modifier=".cg")
    num_above = tl.zeros([FEW], tl.int32)
    mass_above = tl.zeros([FEW], tl.int64)
    for start in range(0, num, 8):
        others_at = start + tl.arange(0, 8)
        others = tl.load(kept_ptr + others_at, mask=others_at < num, other=-2139095041, cache_modifier=".cg")
        above = others[None, :] > keys[:, None]
        num_above += tl.sum(above.to(tl.int32), axis=1)
        if top_p < 1.0:
            masses = _fixed_point(mass_of(float_of(others), best, temperature))
            mass_above += tl.sum(tl.where(above, masses[None, :], 0), axis=1)
    survives = (at < num) & (num_above < top_k)
    if top_p < 1.0:
        masses = _fixed_point(mass_of(float_of(keys), best, temperature))
        mass = tl.sum(tl.where(survives, masses, 0), axis=0)
        survives = survives & (mass_above < tl.maximum((mass.to(tl.float64) * top_p).to(tl.int64), 1))
    survives = survives & (keys >= floor)
    scores = tl.div_rn(float_of(keys), temperature) + noise_of_tokens(ids, position, low, high)
    return tl.max(tl.where(survives, packed(scores, ids), -0x7FFFFFFFFFFFFFFF), axis=0)


@jit
def _best_scored(logits, ids, reach, temperature, position, low, high):
    """The packed key of the best score where `reach` is true; below all others if it is true nowhere."""
    best = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if tl.max(reach.to(tl.int32), axis=0) > 0:
        scores = tl.div_rn(logits, temperature) + noise_of_tokens(ids, position, low, high)
        scores = tl.where(reach, scores, -float("inf"))
        score = tl.max(scores, axis=0)
        best = packed(score, tl.min(tl.where(reach & (scores == score), ids, 0x7FFFFFFF), axis=0))
    return best


@jit
def _level(candidate, lowest_surviving, i):
    """Level `i`: 0, 1/16, 1/8 or 1/4 of the way from the candidate's logit to the lowest surviving one."""
    return tl.where(i == 0, candidate, candidate + (lowest_surviving - candidate) * ((1 << i).to(tl.float32) * 0.03125))


@jit
def _grid_barrier(arrived_ptr, barrier_count):
    """Wait until all programs of the row reach barrier number `barrier_count`, from 1; their writes are visible."""
    tl.debug_barrier()
    if tl.num_programs(0) > 1:
        tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < tl.num_programs(0) * barrier_count:
            pass
        tl.debug_barrier()


@jit
def _gather(logits_ptr, floor, counters_ptr, kept_ptr, vocab, num_tiles, FORM: tl.constexpr):
    """Count the tokens in this program's tiles that reach the floor, and store the first FEW of them."""
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        ids = tile * FORM.tile + tl.arange(0, FORM.tile)
        keys = key_of(tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32))
        kept = (keys >= floor) & (ids < vocab)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            place = tl.atomic_add(counters_ptr + 1 + ids * 0, 1, mask=kept)
            tl.store(kept_ptr + place, keys, mask=kept & (place < FORM.few))
            tl.store(kept_ptr + FORM.few + place, ids, mask=kept & (place < FORM.few))


@jit
def _load_span(logits_ptr, span, vocab, SPAN: tl.constexpr, TILE: tl.constexpr):
    """The tiles of a span [SPAN], and their token ids and logits [SPAN, TILE]."""
    tiles = span * SPAN + tl.arange(0, SPAN)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    return tiles, ids, tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)


@jit
def _count_digit(logits_ptr, digit, counters_ptr, top_k, vocab, num_spans, SPAN: tl.constexpr, TILE: tl.constexpr):
    """Count the tokens in this program's tiles that reach each level of a digit in the k-th best key."""
    kth = _kth_bits(counters_ptr, top_k, digit)
    for span in range(tl.program_id(0), num_spans, tl.num_programs(0)):
        _, ids, logits = _load_span(logits_ptr, span, vocab, SPAN, TILE)
        keys = tl.where(ids < vocab, key_of(logits), -2147483648)
        for i in range(1, 16):
            level = kth + ((tl.full([], 0, tl.int32) + i) << (28 - 4 * digit))
            tl.atomic_add(counters_ptr + 2 + 16 * digit + i, tl.sum((keys >= level).to(tl.int32)))
        tl.atomic_add(counters_ptr + 2 + 16 * digit, tl.where(span == 0, vocab, 0))


@jit
def _mass_of_kept(logits_ptr, kth, best, temperature, above_ptr, vocab, num_tiles, num_spans, FORM: tl.constexpr):
    """The mass of tokens that reach the k-th best key, for each of this program's tiles."""
    for span in range(tl.program_id(0), num_spans, tl.num_programs(0)):
        tiles, _, logits = _load_span(logits_ptr, span, vocab, FORM.span, FORM.tile)
        mass = tl.sum(tl.where(key_of(logits) >= kth, mass_of(logits, best, temperature), 0.0), axis=1)
        tl.store(above_ptr + tiles * FORM.levels, mass.to(tl.int32, bitcast=True), mask=tiles < num_tiles)


@jit
def _mass_above_in_tile(
    logits, candidate, lowest_surviving, best, temperature, above_ptr, inside, LEVELS: tl.constexpr
):  # fmt: skip
    """The mass above each level in a tile."""
    mass = mass_of(logits, best, temperature)
    for i in tl.static_range(LEVELS):
        above = tl.sum(
            tl.where(logits > _level(candidate, lowest_surviving, tl.full([], i, tl.int32)), mass, 0.0), axis=0
        )
        tl.store(above_ptr + i, above.to(tl.int32, bitcast=True), mask=inside)


@jit
def _mass_above_in_tiles(
    logits_ptr, candidate, lowest_surviving, best, temperature, tops, above_ptr, vocab, num_tiles,
    TILE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The mass above each level in each of this program's tiles; reads two tiles at once, or skips both."""
    tiles, no_levels = tl.arange(0, tops.shape[0]), tl.arange(0, 2 * LEVELS)
    for pair in range(tl.program_id(0), tl.cdiv(num_tiles, 2), tl.num_programs(0)):
        pair_masses = above_ptr + pair * (2 * LEVELS)
        if tl.max(tl.where(tiles // 2 == pair, tops, -float("inf")), axis=0) > candidate:
            ids = pair * (2 * TILE) + tl.arange(0, TILE)
            first = tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
            second = tl.load(logits_ptr + TILE + ids, mask=ids + TILE < vocab, other=-float("inf")).to(tl.float32)
            _mass_above_in_tile(first, candidate, lowest_surviving, best, temperature, pair_masses, True, LEVELS)
            inside = 2 * pair + 1 < num_tiles
            _mass_above_in_tile(
                second, candidate, lowest_surviving, best, temperature, pair_masses + LEVELS, inside, LEVELS
            )
        else:
            tl.store(pair_masses + no_levels, 0, mask=2 * pair + no_levels // LEVELS < num_tiles)


@jit
def _rescore_tiles(
    logits_ptr, floor, keys_ptr, temperature, position, low, high, vocab, num_tiles,
    TILE: tl.constexpr, FAILED: tl.constexpr,
):  # fmt: skip
    """Find a new best token above the floor in each of this program's tiles that lost its best one."""
    none = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        key = tl.load(keys_ptr + tile, cache_modifier=".cg")
        if key > none:  # noqa: SIM102
            if key_of(tl.load(logits_ptr + token_of(key)).to(tl.float32)) < floor:
                ids = tile * TILE + tl.arange(0, TILE)
                logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
                reach = (key_of(logits) >= floor) & (ids < vocab)
                tl.store(keys_ptr + tile, _best_scored(logits, ids, reach, temperature, position, low, high))


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def choose_kernel(
    logits_ptr,  # [n, vocab], or a whole step's with INDEXED; rows logits_stride apart
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    params_ptr,  # [num_slots + 1, NUM_PARAMS] int32, rows state_stride apart
    rows_ptr,  # [n]; not read without RESAMPLE
    keys_ptr,  # [n, num_tiles] int64: packed keys of the tiles' best scores; overwritten
    # Workspace in rows work_stride apart. The score kernel has written the first three and cleared the counters.
    tops_ptr,  # [n, num_tiles] int32: the tiles' best logits, as bits
    masses_ptr,  # [n, num_tiles] int32: the tiles' masses, as bits, in units of their best token's
    groups_ptr,  # [n, num_tiles * TILE / GROUP] int32: keys of the groups' best logits
    counters_ptr,  # [n, NUM_COUNTERS] int32, 0
    above_ptr,  # [n, num_tiles, LEVELS] int32: the mass above each level, as bits
    kept_ptr,  # [n, 2, FEW] int32: keys and ids of tokens that reach top-k's floor
    token_ids_ptr,  # [num_rows] int32; with SPLIT keys, [n] int64
    tokens_ptr,  # [num_slots + 1, max_model_len] int32, rows state_stride apart
    vocab,
    num_tiles,
    logits_stride,
    state_stride,
    work_stride,
    AT: tl.constexpr,  # `Columns`
    FORM: tl.constexpr,  # `SampleForm`
):
    """Program (i, j): part i of row j. All programs of a row must be able to run at the same time."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
    filtered = is_filtered(params, AT)
    if FORM.pdl:  # the step's head wrote rows and parameters
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (part == 0) | filtered:
        keys_ptr += row * num_tiles
        key = _best_of_tiles(keys_ptr, num_tiles, FORM)
        if FORM.resample:
            key = tl.where(tl.load(token_ids_ptr + tl.load(rows_ptr + row)) < 0, FORM.failed, key)
        if filtered & (key != FORM.failed):
            logits_ptr = _logits_of(logits_ptr, rows_ptr, row, logits_stride, FORM)
            counters_ptr += row * work_stride
            above_ptr += row * work_stride
            kept_ptr += row * work_stride
            temperature, top_p = load_float(params + AT.temperature), load_float(params + AT.top_p)
            top_k, min_p = tl.minimum(tl.load(params + AT.top_k), vocab), load_float(params + AT.min_p)
            position = tl.load(positions_ptr + row)
            low, high = tl.load(params + AT.seed_low), tl.load(params + AT.seed_high)
            candidate = tl.load(logits_ptr + token_of(key)).to(tl.float32)
            tiles = tl.arange(0, FORM.tiles)
            inside, row_tiles = tiles < num_tiles, row * work_stride + tiles
            tops = tl.load(tops_ptr + row_tiles, mask=inside, other=-8388608).to(tl.float32, bitcast=True)
            masses = tl.load(masses_ptr + row_tiles, mask=inside, other=0).to(tl.float32, bitcast=True)
            best = tl.max(tops, axis=0)
            masses *= mass_of(tops, best, temperature)
            wanted = tl.sum(masses, axis=0) * top_p
            lowest_surviving = tl.where(
                top_p < 1.0, best, -float("inf")
            )  # tokens with this logit and above survive top-p
            floor = tl.full([], -2147483648, tl.int32)  # tokens below this key do not survive
            if min_p > 0.0:
                floor = tl.minimum(key_of(best + temperature * tl.log(min_p)), key_of(best))
            num_spans, barrier_count, searching = (
                tl.cdiv(num_tiles, FORM.span),
                tl.full([], 0, tl.int32),
                tl.full([], 1, tl.int32),
            )

            if top_k > 0:
                groups = num_tiles * (FORM.tile // FORM.group)
                kept_floor = _top_k_floor(
                    groups_ptr + row * work_stride, groups, top_k, FORM.tiles * (FORM.tile // FORM.group)
                )
                _gather(logits_ptr, kept_floor, counters_ptr, kept_ptr, vocab, num_tiles, FORM)
                barrier_count += 1
                _grid_barrier(counters_ptr, barrier_count)
                num_kept = tl.load(counters_ptr + 1, cache_modifier=".cg")
                if num_kept <= FORM.few:
                    searching = tl.full([], 0, tl.int32)
                    if part == 0:
                        key = _best_of_gathered(
                            kept_ptr, num_kept, top_k, top_p, floor, best, temperature, position, low, high, FORM.few
                        )
                        key = tl.where(num_kept > 0, key, FORM.failed)  # no logit is above -inf
                else:
                    for digit in range(8):
                        _count_digit(logits_ptr, digit, counters_ptr, top_k, vocab, num_spans, FORM.span, FORM.tile)
                        barrier_count += 1
                        _grid_barrier(counters_ptr, barrier_count)
                    kth = _kth_bits(counters_ptr, top_k, 8)
                    floor = tl.maximum(floor, kth)
                    if top_p < 1.0:
                        _mass_of_kept(logits_ptr, kth, best, temperature, above_ptr, vocab, num_tiles, num_spans, FORM)
                        barrier_count += 1
                        _grid_barrier(counters_ptr, barrier_count)
                        kept = tl.load(above_ptr + tiles * FORM.levels, mask=inside, other=0, cache_modifier=".cg")
                        wanted = tl.sum(kept.to(tl.float32, bitcast=True), axis=0) * top_p

            while searching > 0:
                if key_of(candidate) < floor:
                    if barrier_count == 0:  # no program still reads the keys that change now
                        barrier_count += 1
                        _grid_barrier(counters_ptr, barrier_count)
                    _rescore_tiles(
                        logits_ptr, floor, keys_ptr, temperature, position, low, high, vocab, num_tiles, FORM.tile,
                        FORM.failed,
                    )  # fmt: skip
                    barrier_count += 1
                    _grid_barrier(counters_ptr, barrier_count)
                    key = _best_of_tiles(keys_ptr, num_tiles, FORM)
                    candidate = tl.load(logits_ptr + token_of(key)).to(tl.float32)
                most_above = tl.sum(tl.where(tops > candidate, masses, 0.0), axis=0)
                if (candidate >= lowest_surviving) | (most_above < wanted):
                    searching = tl.full([], 0, tl.int32)
                else:
                    _mass_above_in_tiles(
                        logits_ptr, candidate, lowest_surviving, best, temperature, tops, above_ptr, vocab, num_tiles,
                        FORM.tile, FORM.levels,
                    )  # fmt: skip
                    barrier_count += 1
                    _grid_barrier(counters_ptr, barrier_count)
                    levels = tl.arange(0, FORM.levels)
                    above = tl.load(
                        above_ptr + tiles[:, None] * FORM.levels + levels[None, :], mask=inside[:, None], other=0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    survives = tl.sum(above.to(tl.float32, bitcast=True), axis=0) < wanted
                    at = _level(candidate, lowest_surviving, levels)
                    if tl.max(tl.where(levels == 0, survives.to(tl.int32), 0), axis=0) > 0:
                        searching = tl.full([], 0, tl.int32)
                    else:
                        excluded = tl.max(tl.where(survives, candidate, at), axis=0)
                        floor = tl.maximum(floor, tl.minimum(key_of(excluded) + 1, key_of(best)))
                        lowest_surviving = tl.minimum(
                            lowest_surviving, tl.min(tl.where(survives, at, float("inf")), axis=0)
                        )
        if part == 0:
            write_token(row, key, slots_ptr, positions_ptr, rows_ptr, token_ids_ptr, tokens_ptr, state_stride, FORM)
