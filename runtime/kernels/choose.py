"""The choice of rows' tokens among those that top-k, top-p and min-p leave: a kernel that decode graphs capture.

`filters.py` says which tokens survive, and computes their lower bound. The kernel finds out only as much as the answer
depends on:

- *Top-p and min-p.* The best scored of all tokens is the answer if it survives, and it does if less than `top_p` of the
  probability lies above it: one sum over the row. Where it does not, no token of its logit or below does, and the best
  scored of the others is the next candidate. This is the rejection sampling of FlashInfer (arXiv 2501.01005), without
  chance, since noise is a function of position and token id. Sums at some levels between the candidate and the best
  token rule out more of them at once.
- *Top-k.* At least k groups of 128 tokens have a best logit that reaches the k-th best of these bests, so the k-th best
  token reaches it, too. The few tokens that do are gathered, and compared with each other. Where they are not few, the
  k-th best logit is found four bits at a time; then it is as above.

The programs of the kernel share the work of all rows that are not settled, and wait for each other between its phases.
Sums of probabilities are always those of whole tiles, added in one order, so that a row's answer depends on no other.
"""

from __future__ import annotations

from runtime.kernels._triton import ROW_ARRAYS, constexpr, jit, tl
from runtime.kernels.gumbel import noise_of_tokens
from runtime.kernels.token_keys import float_of, is_filtered, key_of, load_float, mass_of, packed, token_of, write_token


@jit
def _logits_of(logits_ptr, rows_ptr, row, logits_stride, INDEXED: tl.constexpr):
    """Where the row's logits begin."""
    if INDEXED:
        row = tl.load(rows_ptr + row).to(tl.int64)
    return logits_ptr + row * logits_stride


@jit
def _best_of_tiles(keys_ptr, num_tiles, TILES: tl.constexpr, FAILED: tl.constexpr):
    """The best of a row's packed keys; none is as low as -FAILED."""
    tiles = tl.arange(0, TILES)
    return tl.max(tl.load(keys_ptr + tiles, mask=tiles < num_tiles, other=-FAILED, cache_modifier=".cg"), axis=0)


@jit
def _meet(arrived_ptr, meeting):
    """Wait until all programs have come to this meeting, the first being 1: what they wrote before can be read."""
    tl.debug_barrier()
    if tl.num_programs(0) > 1:
        tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < tl.num_programs(0) * meeting:
            pass
        tl.debug_barrier()


@jit
def _ranks(stages, stage):
    """For each row that is at the stage, the number of those before it; for others -1."""
    there = stages == stage
    return tl.where(there, tl.cumsum(there.to(tl.int32), axis=0) - 1, -1)


@jit
def _row_of(ranks, rank):
    return tl.sum(tl.where(ranks == rank, tl.arange(0, ranks.shape[0]), 0), axis=0).to(tl.int64)


@jit
def _num_at(stages, stage):
    return tl.sum((stages == stage).to(tl.int32), axis=0)


@jit
def _digit(counts, wanted):
    """The largest of sixteen digits that `counts` [16], which fall, show to be reached by as many as wanted."""
    return tl.maximum(tl.sum((counts >= wanted).to(tl.int32), axis=0) - 1, 0)


@jit
def _top_k_floor(groups_ptr, num_groups, top_k, GROUPS: tl.constexpr):
    """A key above that of -inf which at least top_k of the groups' keys reach, or as many as are above it; exact in
    its upper half, of which four bits are found at a time."""
    at = tl.arange(0, GROUPS)
    keys = tl.load(groups_ptr + at, mask=at < num_groups, other=-2147483648)
    floor = tl.full([], -2147483648, tl.int32)
    for i in tl.static_range(4):
        levels = floor + (tl.arange(0, 16) << (28 - 4 * i))
        reaching = tl.sum(((keys[None, :] >= levels[:, None]) & (at < num_groups)[None, :]).to(tl.int32), axis=1)
        floor += _digit(reaching, top_k) << (28 - 4 * i)
    return tl.maximum(floor, -2139095040)


@jit
def _kth_bits(counters_ptr, top_k, num_digits):
    """The upper 4 * num_digits bits of the k-th best key, from the counts at the levels of each digit."""
    threshold = tl.full([], -2147483648, tl.int32)
    for i in range(num_digits):
        counts = tl.load(counters_ptr + 1 + 16 * i + tl.arange(0, 16), cache_modifier=".cg")
        threshold += _digit(counts, top_k) << (28 - 4 * i)
    return threshold


@jit
def _fixed_point(mass):
    """In units of 2^-40: sums of integers do not depend on the order in which tokens were gathered."""
    return (mass * 1099511627776.0).to(tl.int64)


@jit
def _best_of_few(kept_ptr, num, top_k, top_p, floor, best, temperature, position, low, high, FEW: tl.constexpr):
    """The packed key of the best scored of `num` gathered tokens [2, FEW], keys and ids, that survive."""
    at = tl.arange(0, FEW)
    keys = tl.load(kept_ptr + at, mask=at < num, other=-2139095041, cache_modifier=".cg")
    ids = tl.load(kept_ptr + FEW + at, mask=at < num, other=0, cache_modifier=".cg")
    num_above = tl.zeros([FEW], tl.int32)
    mass_above = tl.zeros([FEW], tl.int64)
    for start in range(0, num, 16):
        others_at = start + tl.arange(0, 16)
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
def _score_span(logits, ids, reach, temperature, position, low, high):
    """The packed key of the best scored of these tokens that reach a floor; if none does, one below all others."""
    best = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if tl.max(reach.to(tl.int32), axis=0) > 0:
        scores = tl.div_rn(logits, temperature) + noise_of_tokens(ids, position, low, high)
        scores = tl.where(reach, scores, -float("inf"))
        score = tl.max(scores, axis=0)
        best = packed(score, tl.min(tl.where(reach & (scores == score), ids, 0x7FFFFFFF), axis=0))
    return best


@jit
def _level(candidate, best, i):
    """The level number `i` of eight from the candidate's logit up to the best one."""
    return candidate + (best - candidate) * (i.to(tl.float32) * 0.125)


LEVELS = 8
NUM_COUNTERS = 1 + 8 * 16  # gathered tokens, and those that reach each level of each digit of the k-th best key

# A row's state, int32; floats as their bits.
NUM_STATE = 5
_STAGE, _FLOOR, _BEST, _WANTED, _KEPT_FLOOR = (constexpr(i) for i in range(NUM_STATE))
# Its stages: the answer is written; the candidate is to be tested; a candidate that reaches the floor is sought; tokens
# that may be the top k are gathered; they are too many, so that the k-th best is found by counts.
_SETTLED, _TEST, _SEEK, _GATHER, _COUNT = (constexpr(i) for i in range(5))


@jit(do_not_specialize=["n"], do_not_specialize_on_alignment=ROW_ARRAYS)
def choose_kernel(
    logits_ptr,  # [n, vocab], or those of a whole step if INDEXED; rows logits_stride apart
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    params_ptr,  # [num_slots + 1, NUM_PARAMS] int32, rows state_stride apart
    rows_ptr,  # [n]; not read without RESAMPLE
    keys_ptr,  # [n, num_tiles] int64: packed keys of the tiles' best scored tokens; overwritten
    # Workspace in rows that are work_stride apart; the first three are as the scores' kernel has left them.
    tops_ptr,  # [n, num_tiles] int32: the tiles' best logits, as bits
    masses_ptr,  # [n, num_tiles] int32: the tiles' masses as bits, of which their best tokens have 1
    groups_ptr,  # [n, num_tiles * TILE / GROUP] int32: keys of the groups' best logits
    state_ptr,  # [n, NUM_STATE] int32
    above_ptr,  # [n, num_tiles, LEVELS] int32: the mass above each level, as bits
    counters_ptr,  # [n, NUM_COUNTERS] int32
    kept_ptr,  # [n, 2, FEW] int32: keys and ids of the tokens that reach the floor of top-k
    arrived_ptr,  # [1] int32, 0
    token_ids_ptr,  # [num_rows] int32
    tokens_ptr,  # [num_slots + 1, max_model_len] int32, rows state_stride apart
    n,
    vocab,
    num_tiles,
    logits_stride,
    state_stride,
    work_stride,
    TEMPERATURE: tl.constexpr,
    SEED_LOW: tl.constexpr,
    SEED_HIGH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    RESAMPLE: tl.constexpr,
    INDEXED: tl.constexpr,
    FAILED: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,  # tiles that a program reads at once
    TILES: tl.constexpr,  # power of two, at least num_tiles
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    LEVELS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least n
    PDL: tl.constexpr,
):
    """All programs must be able to run at the same time."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    tiles, rows = tl.arange(0, TILES), tl.arange(0, ROWS)
    num_spans = tl.cdiv(num_tiles, SPAN)
    zero = tl.full([], 0, tl.int32)

    # Each row's own program takes its first stage, and its last.
    for number in range(program, n, num_programs):
        row = (zero + number).to(tl.int64)
        work = row * work_stride
        key = _best_of_tiles(keys_ptr + row * num_tiles, num_tiles, TILES, FAILED)
        if RESAMPLE:
            key = tl.where(tl.load(token_ids_ptr + tl.load(rows_ptr + row)) < 0, FAILED, key)
        params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
        stage = tl.full([], _SETTLED, tl.int32)
        if is_filtered(params, TEMPERATURE, TOP_K, TOP_P, MIN_P) & (key != FAILED):
            temperature = load_float(params + TEMPERATURE)
            top_k = tl.minimum(tl.load(params + TOP_K), vocab)
            top_p = load_float(params + TOP_P)
            min_p = load_float(params + MIN_P)
            tops = tl.load(tops_ptr + work + tiles, mask=tiles < num_tiles, other=-8388608).to(tl.float32, bitcast=True)
            best = tl.max(tops, axis=0)
            masses = tl.load(masses_ptr + work + tiles, mask=tiles < num_tiles, other=0).to(tl.float32, bitcast=True)
            wanted = tl.sum(masses * mass_of(tops, best, temperature), axis=0) * top_p
            wanted = tl.where(top_p < 1.0, wanted, float("inf"))
            floor = tl.full([], -2147483648, tl.int32)
            if min_p > 0.0:
                floor = tl.minimum(key_of(best + temperature * tl.log(min_p)), key_of(best))
            of_row = _logits_of(logits_ptr, rows_ptr, row, logits_stride, INDEXED)
            candidate = tl.load(of_row + token_of(key)).to(tl.float32)
            if top_k > 0:
                stage = tl.full([], _GATHER, tl.int32)
                kept_floor = _top_k_floor(
                    groups_ptr + work, num_tiles * (TILE // GROUP), top_k, TILES * (TILE // GROUP)
                )
                tl.store(state_ptr + work + _KEPT_FLOOR, kept_floor)
                counters = tl.arange(0, 256)
                tl.store(counters_ptr + work + counters, 0, mask=counters < NUM_COUNTERS)
            elif key_of(candidate) < floor:
                stage = tl.full([], _SEEK, tl.int32)
            elif (top_p < 1.0) & (candidate < best):
                stage = tl.full([], _TEST, tl.int32)
            tl.store(state_ptr + work + _FLOOR, floor)
            tl.store(state_ptr + work + _BEST, best.to(tl.int32, bitcast=True))
            tl.store(state_ptr + work + _WANTED, wanted.to(tl.int32, bitcast=True))
        if stage == _SETTLED:
            write_token(
                row, key, slots_ptr, positions_ptr, rows_ptr, token_ids_ptr, tokens_ptr, state_stride, RESAMPLE, FAILED
            )
        tl.store(state_ptr + work + _STAGE, stage)

    slots = tl.load(slots_ptr + rows, mask=rows < n, other=0).to(tl.int64)
    filtered = is_filtered(params_ptr + slots * state_stride, TEMPERATURE, TOP_K, TOP_P, MIN_P) & (rows < n)
    if tl.max(filtered.to(tl.int32), axis=0) > 0:
        stages_ptr = state_ptr + _STAGE + rows.to(tl.int64) * work_stride
        _meet(arrived_ptr, 1)
        meeting = 1
        stages = tl.load(stages_ptr, mask=rows < n, other=0, cache_modifier=".cg")

        num = _num_at(stages, _GATHER)
        if num > 0:
            ranks = _ranks(stages, _GATHER)
            for item in range(program, num * num_spans, num_programs):
                row, span = _row_of(ranks, item // num_spans), item % num_spans
                work, ids = row * work_stride, span * SPAN * TILE + tl.arange(0, SPAN * TILE)
                of_row = _logits_of(logits_ptr, rows_ptr, row, logits_stride, INDEXED)
                keys = key_of(tl.load(of_row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32))
                floor = tl.load(state_ptr + work + _KEPT_FLOOR, cache_modifier=".cg")
                kept = (keys >= floor) & (ids < vocab)
                if tl.max(kept.to(tl.int32), axis=0) > 0:
                    place = tl.atomic_add(counters_ptr + work + ids * 0, 1, mask=kept)
                    tl.store(kept_ptr + work + place, keys, mask=kept & (place < FEW))
                    tl.store(kept_ptr + work + FEW + place, ids, mask=kept & (place < FEW))
            _meet(arrived_ptr, 2)
            for number in range(program, n, num_programs):
                row = (zero + number).to(tl.int64)
                work = row * work_stride
                if tl.load(state_ptr + work + _STAGE) == _GATHER:
                    num_kept = tl.load(counters_ptr + work, cache_modifier=".cg")
                    stage = tl.full([], _COUNT, tl.int32)
                    if num_kept <= FEW:
                        stage = tl.full([], _SETTLED, tl.int32)
                        params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
                        key = _best_of_few(
                            kept_ptr + work, num_kept, tl.load(params + TOP_K),
                            load_float(params + TOP_P), tl.load(state_ptr + work + _FLOOR),
                            load_float(state_ptr + work + _BEST),
                            load_float(params + TEMPERATURE), tl.load(positions_ptr + row),
                            tl.load(params + SEED_LOW), tl.load(params + SEED_HIGH), FEW,
                        )  # fmt: skip
                        key = tl.where(num_kept > 0, key, FAILED)  # no logit is above -inf
                        write_token(
                            row, key, slots_ptr, positions_ptr, rows_ptr, token_ids_ptr, tokens_ptr, state_stride,
                            RESAMPLE, FAILED,
                        )  # fmt: skip
                    tl.store(state_ptr + work + _STAGE, stage)
            _meet(arrived_ptr, 3)
            meeting = 3
            stages = tl.load(stages_ptr, mask=rows < n, other=0, cache_modifier=".cg")

            num = _num_at(stages, _COUNT)
            if num > 0:
                ranks = _ranks(stages, _COUNT)
                for digit in range(9):  # after the last one, the mass of those that reach the k-th best
                    for item in range(program, num * num_spans, num_programs):
                        row, span = _row_of(ranks, item // num_spans), item % num_spans
                        work, of_span = row * work_stride, span * SPAN + tl.arange(0, SPAN)
                        ids = of_span[:, None] * TILE + tl.arange(0, TILE)[None, :]
                        of_row = _logits_of(logits_ptr, rows_ptr, row, logits_stride, INDEXED)
                        logits = tl.load(of_row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
                        params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
                        top_k = tl.minimum(tl.load(params + TOP_K), vocab)
                        kth = _kth_bits(counters_ptr + work, top_k, digit)
                        keys = tl.where(ids < vocab, key_of(logits), -2147483648)
                        if digit < 8:
                            for i in range(1, 16):
                                reaching = tl.sum((keys >= kth + ((zero + i) << (28 - 4 * digit))).to(tl.int32))
                                tl.atomic_add(counters_ptr + work + 1 + 16 * digit + i, reaching)
                            tl.atomic_add(counters_ptr + work + 1 + 16 * digit, tl.where(span == 0, vocab, 0))
                        else:
                            best = load_float(state_ptr + work + _BEST)
                            temperature = load_float(params + TEMPERATURE)
                            mass = tl.where(keys >= kth, mass_of(logits, best, temperature), 0.0)
                            place = above_ptr + work + of_span * LEVELS
                            tl.store(place, tl.sum(mass, axis=1).to(tl.int32, bitcast=True), mask=of_span < num_tiles)
                    meeting += 1
                    _meet(arrived_ptr, meeting)
                for number in range(program, n, num_programs):
                    row = (zero + number).to(tl.int64)
                    work = row * work_stride
                    if tl.load(state_ptr + work + _STAGE) == _COUNT:
                        params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
                        top_p = load_float(params + TOP_P)
                        of_tiles = tl.load(
                            above_ptr + work + tiles * LEVELS, mask=tiles < num_tiles, other=0, cache_modifier=".cg"
                        )
                        mass = tl.sum(of_tiles.to(tl.float32, bitcast=True), axis=0)
                        wanted = tl.where(top_p < 1.0, mass * top_p, float("inf"))
                        kth = _kth_bits(counters_ptr + work, tl.minimum(tl.load(params + TOP_K), vocab), 8)
                        tl.store(state_ptr + work + _FLOOR, tl.maximum(tl.load(state_ptr + work + _FLOOR), kth))
                        tl.store(state_ptr + work + _WANTED, wanted.to(tl.int32, bitcast=True))
                        tl.store(state_ptr + work + _STAGE, tl.full([], _SEEK, tl.int32))
                meeting += 1
                _meet(arrived_ptr, meeting)
                stages = tl.load(stages_ptr, mask=rows < n, other=0, cache_modifier=".cg")

        num_levels = 1  # most first candidates survive
        num_sought = _num_at(stages, _SEEK)
        num = _num_at(stages, _TEST) + num_sought
        while num > 0:
            if num_sought > 0:
                ranks = _ranks(stages, _SEEK)
                for item in range(program, num_sought * num_spans, num_programs):
                    row, span = _row_of(ranks, item // num_spans), item % num_spans
                    ids = span * SPAN * TILE + tl.arange(0, SPAN * TILE)
                    of_row = _logits_of(logits_ptr, rows_ptr, row, logits_stride, INDEXED)
                    logits = tl.load(of_row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
                    floor = tl.load(state_ptr + row * work_stride + _FLOOR, cache_modifier=".cg")
                    params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
                    key = _score_span(
                        logits, ids, (key_of(logits) >= floor) & (ids < vocab),
                        load_float(params + TEMPERATURE), tl.load(positions_ptr + row),
                        tl.load(params + SEED_LOW), tl.load(params + SEED_HIGH),
                    )  # fmt: skip
                    of_span = span * SPAN + tl.arange(0, SPAN)
                    keys = tl.where(of_span == span * SPAN, key, -FAILED)
                    tl.store(keys_ptr + row * num_tiles + of_span, keys, mask=of_span < num_tiles)
                meeting += 1
                _meet(arrived_ptr, meeting)
                stages = tl.where(stages == _SEEK, _TEST, stages)
            ranks = _ranks(stages, _TEST)
            for item in range(program, num * num_spans, num_programs):
                row, span = _row_of(ranks, item // num_spans), item % num_spans
                work, of_span = row * work_stride, span * SPAN + tl.arange(0, SPAN)
                ids = of_span[:, None] * TILE + tl.arange(0, TILE)[None, :]
                of_row = _logits_of(logits_ptr, rows_ptr, row, logits_stride, INDEXED)
                logits = tl.load(of_row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
                key = _best_of_tiles(keys_ptr + row * num_tiles, num_tiles, TILES, FAILED)
                candidate = tl.load(of_row + token_of(key)).to(tl.float32)
                best = load_float(state_ptr + work + _BEST)
                params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
                mass = mass_of(logits, best, load_float(params + TEMPERATURE))
                for i in range(num_levels):
                    above = tl.sum(tl.where(logits > _level(candidate, best, zero + i), mass, 0.0), axis=1)
                    place = above_ptr + work + of_span * LEVELS + i
                    tl.store(place, above.to(tl.int32, bitcast=True), mask=of_span < num_tiles)
            meeting += 1
            _meet(arrived_ptr, meeting)
            for number in range(program, n, num_programs):
                row = (zero + number).to(tl.int64)
                work = row * work_stride
                stage = tl.load(state_ptr + work + _STAGE)
                if (stage == _TEST) | (stage == _SEEK):
                    key = _best_of_tiles(keys_ptr + row * num_tiles, num_tiles, TILES, FAILED)
                    of_row = _logits_of(logits_ptr, rows_ptr, row, logits_stride, INDEXED)
                    candidate = tl.load(of_row + token_of(key)).to(tl.float32)
                    best = load_float(state_ptr + work + _BEST)
                    wanted = load_float(state_ptr + work + _WANTED)
                    levels = tl.arange(0, LEVELS)
                    mask = (tiles[:, None] < num_tiles) & (levels[None, :] < num_levels)
                    at = above_ptr + work + tiles[:, None] * LEVELS + levels[None, :]
                    above = tl.load(at, mask=mask, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
                    above = tl.sum(above, axis=0)
                    if (tl.sum(tl.where(levels == 0, above, 0.0), axis=0) < wanted) | (candidate >= best):
                        tl.store(state_ptr + work + _STAGE, tl.full([], _SETTLED, tl.int32))
                        write_token(
                            row, key, slots_ptr, positions_ptr, rows_ptr, token_ids_ptr, tokens_ptr, state_stride,
                            RESAMPLE, FAILED,
                        )  # fmt: skip
                    else:
                        excluded = (above >= wanted) & (levels < num_levels)
                        excluded = tl.max(tl.where(excluded, _level(candidate, best, levels), candidate), axis=0)
                        floor = tl.minimum(key_of(excluded) + 1, key_of(best))
                        tl.store(state_ptr + work + _FLOOR, tl.maximum(tl.load(state_ptr + work + _FLOOR), floor))
                        tl.store(state_ptr + work + _STAGE, tl.full([], _SEEK, tl.int32))
            meeting += 1
            _meet(arrived_ptr, meeting)
            stages = tl.load(stages_ptr, mask=rows < n, other=0, cache_modifier=".cg")
            num_sought = _num_at(stages, _SEEK)
            num = num_sought
            num_levels = LEVELS
