"""Attention over a paged cache: rows of one token, drafts, prompts, windows, sinks and stored forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from runtime.kernels import operations as ops
from runtime.kernels.attention.attention_torch import AttentionShape, plan_attention
from runtime.kernels.attention.paged_attention import AttentionForm, PagedBatch, PagedRows, paged_attention_torch
from runtime.kernels.attention.tiled_rows import TiledRows, attention_tiles
from tests.kernels.case import Case, Draw
from tests.support.kernels.attention_cases import encoded, paged_case, sinks_of, without_hidden

NEAR = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FLOAT32 = {torch.float32: 5e-6}
SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
IMAGES = ((3, 20), (33, 34), (64, 130), (130, 141), (500, 640))  # first position and end
Spans = list[tuple[int, int]]  # start and count of each row
LLVM, TRITON = "torch llvm", "torch triton"


def rows_of(rows: PagedRows, spans: Sequence[tuple[int, int, int]], ready: bool) -> PagedRows:
    """Spans (row, first token in it, count), each as a row."""
    picked, firsts, counts = (torch.tensor(x, device=rows.slots.device) for x in zip(*spans, strict=True))
    starts, edges = rows.starts[picked] + firsts, torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    most, longest = int(counts.max()), int((starts + counts).max())
    return PagedRows(
        rows.slots[picked], starts.int(), edges.int(), rows.tables, len(spans), int(edges[-1]), most, longest, ready
    )


def with_images(rows: PagedRows) -> PagedRows:
    """The rows with images at the same positions of each. The end of a row ends an image."""
    last = []
    for start, count in spans_of(rows):
        own = np.arange(start, start + count)
        for begin, end in IMAGES:
            own[(own >= begin) & (own < end)] = min(end, start + count) - 1
        last.append(own)
    visible = torch.from_numpy(np.concatenate(last).astype(np.int32))
    return replace(rows, last_visible=visible.to(rows.slots.device))


def spans_of(rows: PagedRows) -> Spans:
    return list(zip(rows.starts.tolist(), rows.q_starts.diff().tolist(), strict=True))


def single_tokens(rows: PagedRows) -> PagedRows:
    """Each token alone. Positions that it does not see cannot matter."""
    counts = rows.q_starts.diff().tolist()
    return rows_of(rows, [(row, i, 1) for row, count in enumerate(counts) for i in range(count)], False)


def plan_of(kernels: Any, q: torch.Tensor, kv: torch.Tensor, rows: PagedRows) -> Any:
    """The rows as the backend plans them."""
    counts = [count for _, count in spans_of(rows)]
    if kernels.name == "triton":
        return PagedBatch(len(q), parts_of(rows, counts))
    full = [row for row, count in enumerate(counts) if count]
    starts, counts = rows.starts[full].numpy(), np.array(counts, np.int32)[full]
    tables = rows.tables[rows.slots[full].long()]
    tables = torch.where(tables < kv.shape[2], tables, 0).int().contiguous()
    seen = rows.last_visible
    if kernels.name == "llvm":
        tiles = torch.from_numpy(attention_tiles(starts, counts, np.arange(len(full))))
        return TiledRows(len(q), tiles, tables, seen)
    shape = AttentionShape(q.shape[1], kv.shape[1], kv.shape[2], kv.shape[3], q.dtype, q.device, kernels.deterministic)
    return plan_attention(tables.numpy(), starts, counts, shape, None if seen is None else seen.numpy())


def attend(kernels: Any, q: torch.Tensor, kv: torch.Tensor, rows: PagedRows, *others: Any) -> torch.Tensor:
    """Attention with the backend's plan of the rows."""
    if kernels.name == "reference":
        return paged_attention_torch(q, kv, single_tokens(rows) if rows.last_visible is None else rows, *others)
    if kernels.name == "torch":  # its caches are zeros before they are written
        kv, others = kv.float().nan_to_num().to(kv.dtype), (others[0], *(x.nan_to_num() for x in others[1:]))
    return kernels[ops.ATTENTION](q, kv, plan_of(kernels, q, kv, rows), *others)


def parts_of(rows: PagedRows, counts: list[int]) -> list[PagedRows]:
    """Rows of one token, and the others behind them, as a step without graphs has them."""
    short = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    if rows.prefix_ready or short in (0, len(counts)):
        return [rows]
    first, last = (
        replace(rows, slots=rows.slots[own], starts=rows.starts[own], num_rows=len(counts[own]))
        for own in (slice(0, short), slice(short, None))
    )
    first.q_starts, last.q_starts = rows.q_starts[: short + 1], rows.q_starts[short:]
    first.max_count, first.num_tokens = 1, short
    return [first, last]


def cut_images(arguments: Sequence[Any]) -> Iterator[tuple[slice, Sequence[Any]]]:
    """Rows that begin anywhere, a prefix hit, and end behind an image."""
    q, kv, rows, *others = arguments
    edges, spans = rows.q_starts.tolist(), spans_of(rows)
    for row, (start, count) in enumerate(spans):
        stops = {end - start for _, end in IMAGES if 0 < end - start < count}
        for stop in sorted(stops | {count}):
            for first in {0, 1, stop // 3, stop // 2, stop - 1} & set(range(stop)):
                own = slice(edges[row] + first, edges[row] + stop)
                yield own, (q[own], kv, with_images(rows_of(rows, [(row, first, stop - first)], False)), *others)


def cut(arguments: Sequence[Any]) -> Iterator[tuple[slice | list[int], Sequence[Any]]]:
    """Tokens of each row alone, in chunks, among others, as drafts, and in other blocks."""
    q, kv, rows, *others = arguments
    edges, spans = rows.q_starts.tolist(), spans_of(rows)
    for row, (_, count) in enumerate(spans[:6]):
        for size in {1, 7, 64, 513, count} & set(range(1, count + 1)):
            for first in sorted({0, count // 2 // size * size, (count - 1) // size * size}):
                own = slice(edges[row] + first, edges[row] + min(first + size, count))
                part = rows_of(rows, [(row, first, own.stop - own.start)], False)
                yield own, (q[own], kv, part, *others)
        for size in {1, 4, 8} & set(range(1, count + 1)):
            firsts = range(max(0, count - size - 8), count - size + 1)
            drafts = rows_of(rows, [(row, first, size) for first in firsts], True)
            tokens = [edges[row] + first + i for first in firsts for i in range(size)]
            yield tokens, (q[tokens], kv, drafts, *others)
    moved = torch.randperm(kv.shape[2] - 1, generator=torch.Generator().manual_seed(1)).add(1)
    moved = torch.cat((torch.zeros(1, dtype=torch.int64), moved)).to(kv.device)
    known = rows.tables < kv.shape[2]
    tables = torch.where(known, torch.argsort(moved)[torch.where(known, rows.tables, 0).long()], rows.tables).int()
    form, *scales = others
    scales = [x if not isinstance(x, torch.Tensor) or x.dim() != 4 else x[:, moved].contiguous() for x in scales]
    yield slice(None), (q, kv[:, :, moved].contiguous(), replace(rows, tables=tables), form, *scales)


def spoil_cache(part: int, row: int, position: int):
    """A fault in a key or a value. A key may be infinitely far from a query."""

    def spoil(arguments: Sequence[Any], value: float) -> None:
        _, kv, rows, _, *scales = arguments
        block, offset = int(rows.tables[rows.slots[row], position // kv.shape[3]]), position % kv.shape[3]
        value = value if part else torch.nan
        if scales and scales[0].dim() > 2:
            scales[0][0, block, offset, part] = value
        else:
            kv[part, 0, block, offset, 5] = torch.nan if kv.dtype == torch.float8_e4m3fn else value

    return spoil


def attention(
    kind: str, spans: Spans, heads: tuple[int, int, int] = (4, 2, 64), block: int = 16, stored: str = "",
    ready: bool = False, padding: int = 0, bounds: dict[str, int] | None = None, near=FLOAT32, on: str = TRITON,
    bits: str = "torch llvm cuda", size: float = 1.0, faults: tuple[int, int] | None = None, sinks: bool = False,
    scale: float = 0.0, unit: bool = False, images: bool = False, **form: Any,
) -> Case:  # fmt: skip
    """`bounds` are the host's, which may be too large. No spans: they follow from the seed. `faults`: row, position."""

    def arguments(draw: Draw):
        rng = np.random.default_rng(draw.seed)
        own = spans or [(int(rng.integers(200)), int(rng.integers(1, 40))) for _ in range(rng.integers(1, 5))]
        own = sorted(own, key=lambda span: (span[1] != 1, span[0] * (span[1] == 1)))  # the order of a step
        q, kv, rows = paged_case(own, heads, block, draw.dtype, draw.device, draw.seed, padding)
        for name, bound in (bounds or {}).items():
            setattr(rows, name, bound)
        rows.prefix_ready = ready
        rows = with_images(rows) if images else rows
        kv = without_hidden(kv, rows, form.get("window", 0), form.get("first_key", 0))
        if unit:
            q, kv = exact_sums(q, kv, rows)
        scales: tuple[torch.Tensor, ...] = ()
        if stored in ("fp8", "int8"):
            kv, *scales = encoded(stored, kv)
        elif stored:
            kv = kv.to(SHORT[stored])
        if draw.wide:
            q, kv = q.double(), kv if scales else kv.double()
        own_sinks = sinks_of(heads[0], draw.device) if sinks else None
        return (
            q * size,
            kv,
            rows,
            AttentionForm(scale or heads[2] ** -0.5, sinks=own_sinks, whole_images=images, **form),
            *scales,
        )

    name = f"attention, {kind} {spans} {heads} {block} {stored} {form} {sinks}"
    return Case(
        name, ops.ATTENTION, arguments, call=attend, parts=cut_images if images else cut, near=near, on=on,
        bits_on=bits, faults=(0, spoil_cache(0, *faults), spoil_cache(1, *faults)) if faults else (),
    )  # fmt: skip


def exact_sums(q: torch.Tensor, kv: torch.Tensor, rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The interpreter's products come from a BLAS, where a row's index in its tile may show. These are exact: scores
    are integers, and in each tile at most one position has a value in a given dimension."""
    places = torch.arange(int(rows.starts[0] + rows.q_starts[1]))
    index = rows.tables[rows.slots[0], places // kv.shape[3]].long(), places % kv.shape[3]
    kv = kv.nan_to_num(7.0)
    kv[0].round_()
    kv[1][:, *index] *= torch.eye(64)[places % 64].to(kv.dtype)
    return q.round(), kv


HEADS = [(2, 2, 64), (3, 1, 80), (4, 1, 96), (8, 1, 128), (2, 1, 256)]
FORMS = [
    dict(form, sinks=sinks)
    for form in ({}, {"window": 19}, {"window": 64, "soft_cap": 2.0}, {"soft_cap": 5.0})
    for sinks in (False, True)
]
FAR = (511, 512, 575, 576, 639, 1023, 0)  # starts near the ends of segments
LAYERS: list[dict[str, Any]] = [
    {"heads": (4, 2, 64)},
    {"heads": (3, 3, 8), "block": 1},
    {"heads": (3, 1, 24), "block": 100},
    {"heads": (10, 2, 80), "block": 32, "window": 20},
    {"heads": (4, 2, 16), "window": 1},
    {"heads": (4, 1, 256), "block": 24, "soft_cap": 2.0, "window": 70},
    {"heads": (8, 1, 512)},
    {"heads": (4, 1, 512), "stored": "int8"},
    {"heads": (8, 1, 64), "window": 128, "sinks": True},
    {"heads": (6, 2, 24), "window": 20, "soft_cap": 3.0, "sinks": True},
    {"heads": (4, 2, 64), "stored": "int8", "sinks": True},
    {"heads": (8, 2, 36), "stored": "fp8", "sinks": True},
    {"heads": (4, 2, 128), "stored": "bfloat16", "on": "llvm"},
    {"heads": (7, 1, 20), "block": 4, "stored": "float16", "on": "llvm"},
    {"heads": (6, 2, 64), "stored": "int8", "window": 33},
    {"heads": (4, 2, 40), "block": 7, "stored": "int8"},
    {"heads": (8, 2, 64), "stored": "fp8"},
    {"heads": (4, 2, 36), "block": 64, "stored": "fp8", "soft_cap": 5.0},
    {"heads": (6, 2, 24), "first_key": 1},
    {"heads": (4, 1, 16), "block": 1, "first_key": 1, "window": 20, "soft_cap": 3.0, "sinks": True},
    {"heads": (4, 2, 64), "stored": "int8", "first_key": 1},
]

# A draft head's layer: position 0 is hidden. Padding is there.
FIRST_KEY: list[dict[str, Any]] = [
    {}, {"window": 19}, {"window": 64, "soft_cap": 2.0, "sinks": True}, {"soft_cap": 5.0}, {"stored": "int8"},
    {"stored": "fp8", "window": 19},
]  # fmt: skip

GPU_HEADS = [(8, 8, 64), (9, 3, 64), (32, 8, 64), (6, 2, 80), (8, 2, 96), (24, 8, 128), (8, 1, 128), (4, 1, 256)]
GPT_OSS: tuple[int, int, int] = (64, 8, 64)
LENGTHS = [(n, 1) for n in (0, 62, 63, 64, 133, 700, 2047, 5000)]
PROMPTS = [(0, 1), (0, 71), (65, 333), (129, 1), (1500, 260), (0, 513), (2048, 128)]
BFLOAT16 = {torch.bfloat16: NEAR[torch.bfloat16]}
ON_GPUS = [
    *(
        attention("large decode", spans, heads, block, near=NEAR, padding=padding, on="cuda")
        for heads in [*GPU_HEADS, (8, 1, 512)]
        for spans, block, padding in ((LENGTHS, 16, 3), (LENGTHS[:5] * 40, 32, 0), ([(3000, 1)], 16, 0))
    ),
    *(
        attention(
            "large drafts", [(70, n), (0, n), (63, 1), (1021, n - 1), (2048, n)], heads, near=BFLOAT16, ready=True,
            on="cuda",
        )
        for n in range(2, 9) for heads in ((9, 3, 64), (32, 8, 128), (4, 1, 256), (8, 1, 512))
    ),
    *(
        attention("large prompts", spans, heads, block, near=NEAR, on="cuda")
        for heads in [*GPU_HEADS, (8, 1, 512)] for spans, block in ((PROMPTS, 16), ([(0, 1500)], 64))
    ),
    *(
        attention(
            "large forms", spans, heads, block, ready=ready, scale=0.3 * heads[2] ** -0.5, near=BFLOAT16, on="cuda",
            **form,
        )
        for heads in ((4, 2, 64), (4, 1, 256), (8, 1, 512)) for block in (3, 16, 32, 64, 1024)
        for form in ({}, {"window": 19}, {"window": 512}, {"window": 100, "soft_cap": 2.0}, {"soft_cap": 5.0})
        for spans, ready in (
            ([(1700, 2), (0, 1), (20, 1), (900, 2)], True), ([(130, 450), (0, 3), (20, 1), (0, 600)], False),
        )
    ),
    *(
        attention(
            "large sinks", spans, GPT_OSS, stored=stored, ready=ready, near=BFLOAT16, sinks=True, on="cuda", **form
        )
        for stored in ("", "fp8", "int8") for form in ({}, {"window": 128}, {"window": 100, "soft_cap": 2.0})
        for spans, ready in (
            ([(3000, 1)], False), ([(3000, 1)], True), ([(700, 1), (0, 1), (5000, 1)], False),
            ([(70, 4), (0, 4), (2048, 3)], True), ([(130, 1)] * 200, True), ([(0, 71), (65, 333), (1500, 260)], False),
            ([(9000, 100)], False), ([(0, 1700)], False),
        )
    ),
    *(
        attention("large stored", spans, heads, stored=stored, ready=ready, near=NEAR, on="cuda", **form)
        for stored in ("fp8", "int8") for heads in ((9, 3, 64), (6, 2, 80), (32, 8, 128), (4, 1, 256))
        for form in ({}, {"window": 100, "soft_cap": 2.0})
        for spans, ready in ((LENGTHS, False), ([(70, 4), (1021, 3), (0, 4)], True), (PROMPTS[1:5], False),
                             ([(0, 1700)], False))
    ),
    *(
        attention(
            "large first key", spans, heads, ready=ready, padding=padding, near=NEAR, first_key=1, on="cuda", **form
        )
        for heads in ((24, 8, 128), (9, 3, 64), (4, 1, 256)) for form in FIRST_KEY
        for spans, ready, padding in (
            ([(n + 1, 1) for n, _ in LENGTHS], True, 3), ([(70, 4), (1, 4), (1021, 3)], True, 2),
            ([(1, 70), (65, 333), (1500, 260)], False, 0), ([(1, 1700)], False, 0),
        )
    ),
    *(
        attention("bits of a long row", [(0, 1700)], heads, near=NEAR, window=window, on="cuda")
        for heads in ((9, 3, 64), (32, 8, 64), (24, 8, 128), (4, 1, 256)) for window in (0, 700)
    ),
]  # fmt: skip

CASES = [
    *(attention("random rows", [], **{"on": LLVM, "size": 3.0, **layer}) for layer in LAYERS),
    *(
        attention("faults", [(0, 35), (90, 3)], **{"on": "llvm", "faults": (0, 18), **layer})
        for layer in (LAYERS[i] for i in (0, 3, 14, 17, 8))
    ),
    attention("large scores", [(0, 20), (100, 2)], size=1e4, near={torch.float32: 1e-3}, on="llvm"),
    *(
        attention("decode", [(0, 1), (62, 1), (133, 1)], heads, padding=1, near=NEAR)
        for heads in [*HEADS, (6, 2, 64), (8, 1, 512)]
    ),
    *(
        attention("decode, windows", [(start, count) for start in starts], (2, 1, 32), ready=count > 1, window=window)
        for window in (1, 5, 64, 65, 128, 513) for starts in (FAR, FAR[3:4], FAR[5:6]) for count in (1, 3)
    ),
    *(
        attention("drafts", [(70, n), (0, n), (63, 1), (126, max(1, n - 1))], (3, 1, 64), ready=True)
        for n in range(1, 9)
    ),
    attention("drafts", [(70, 5), (0, 3), (63, 1)], (8, 1, 320), ready=True, near=NEAR),
    *(
        attention("decode, forms", [(170, 2), (0, 1), (20, 1)], block=block, ready=True, scale=0.3, **form)
        for block in (3, 16, 256) for form in FORMS
    ),
    *(
        attention("settled rows", [(70, n), (9, n), (140, n)], (3, 1, 64), ready=True, **form)
        for n in (1, 3) for form in ({}, {"window": 19, "soft_cap": 2.0}, {"window": 100, "sinks": True})
    ),
    attention("large bounds", [(40, 1), (150, 1)], (4, 1, 64), padding=1, bounds={"max_len": 1 << 17}),
    *(
        attention("decode, stored", [(70, 3), (0, 1), (133, 1)], heads, stored=stored, ready=True, near=NEAR, **form)
        for stored in ("fp8", "int8") for heads in ((3, 1, 80), (4, 2, 64))
        for form in ({"window": 100}, {"soft_cap": 3.0}, {"sinks": True})
    ),
    *(attention("prompts", [(0, 71), (65, 33), (129, 1)], heads, near=NEAR) for heads in [*HEADS, (4, 2, 512)]),
    *(
        attention("prompts, forms", [(130, 50), (0, 3), (20, 1)], block=block, scale=0.3, **form)
        for block in (3, 16, 256) for form in FORMS
    ),
    *(
        attention("prompts, stored", [(0, 3), (65, 33)], heads, stored=stored, **form)
        for stored in ("fp8", "int8") for heads in ((3, 1, 80), (4, 2, 64)) for form in ({"window": 19},)
    ),
    *(attention("prompts, stored", [(65, 33)], stored=kind, window=19, sinks=True) for kind in ("fp8", "int8")),
    *(
        attention("few tokens behind many", spans, bounds=bounds, **form)
        for spans, form in (
            ([(500, 9), (0, 5)], {}), ([(0, 0), (420, 20), (0, 1), (0, 0)], {}),
            ([(620, 9)], {"window": 300, "soft_cap": 3.0}), ([(620, 9), (3, 1)], {"sinks": True}),
        )
        for bounds in ({}, {"num_tokens": 2000, "max_len": 2000})
    ),
    *(attention("mixed rows", [(40, 1)] * n + [(0, 0), (20, 35), (129, 17)]) for n in (1, 15, 16, 33)),
    *(
        attention("bits", spans, (3, 1, 64), unit=True, scale=0.125, on="triton", bits="triton", **form)
        for spans in ([(508, 52)], [(0, 30)])
        for form in ({}, {"sinks": True}, {"window": 100}, {"window": 100, "sinks": True})
    ),
    *(
        attention(f"faults of {kind}", spans, stored=stored, faults=(1, 3), near=NEAR, **form)
        for kind, spans in (("decode", [(20, 1), (37, 1), (5, 1)]), ("prompts", [(20, 3), (30, 8), (0, 4)]))
        for stored, form in (("", {}), ("int8", {}), ("", {"sinks": True}))
    ),
    *(
        attention(
            "first key", spans, heads, block=block, ready=ready, padding=padding, faults=(0, 0), first_key=1,
            near=NEAR, on="torch triton llvm", **form,
        )
        for spans, heads, block, ready, padding in (
            ([(1, 1), (62, 1), (133, 1), (0, 1)], (4, 2, 64), 16, False, 1),
            ([(70, 3), (1, 3), (14, 2)], (3, 1, 24), 16, True, 0),
            ([(1, 71), (65, 33), (0, 5)], (2, 1, 64), 3, False, 0),
            ([(420, 20), (1, 5)], (4, 2, 32), 16, False, 0),
        )
        for form in FIRST_KEY
    ),
    attention("first key, images", [(1, 150), (70, 62)], first_key=1, images=True, on="torch triton llvm"),
    *(
        attention("images", spans, heads, block=block, images=True, on="torch triton llvm", **form)
        for spans, heads, block in (
            ([(0, 150), (70, 62)], (4, 2, 64), 16), ([(0, 1), (19, 1), (10, 131), (0, 37)], (3, 1, 24), 3),
            ([(510, 130), (65, 1)], (2, 1, 256), 64),
        )
        for form in ({}, {"window": 19}, {"window": 64, "sinks": True, "soft_cap": 2.0}, {"stored": "int8"})
    ),
    *ON_GPUS,
]  # fmt: skip
