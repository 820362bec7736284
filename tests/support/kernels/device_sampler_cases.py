"""Checks of the kernels at a step's two ends and of the device sampler against their torch twins, on any device."""

import numpy as np
import torch

from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.automata import (
    advance_states_torch,
    advance_states_triton,
    mask_states_torch,
    mask_states_triton,
)
from runtime.kernels.sampling.bitmask import apply_bitmask_torch, apply_bitmask_triton
from runtime.kernels.sampling.gumbel import gumbel_noise, noise_keys
from runtime.kernels.sampling.penalties import NUM_TABLES, penalise_torch, penalise_triton
from runtime.kernels.sampling.sample import (
    FREQUENCY,
    MIN_P,
    NUM_PARAMS,
    PENALISED_FROM,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Resample,
    sample_tokens_torch,
    sample_tokens_triton,
)
from runtime.kernels.step.graph_io import read_input, read_input_torch, write_output, write_output_torch
from runtime.kernels.step.scatter_writes import scatter_writes, scatter_writes_torch
from runtime.kernels.step.step_inputs import build_inputs, build_inputs_torch
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers

CPU = torch.device("cpu")
EOS = 2


def check_masks(device: torch.device = CPU) -> None:
    """Masks of words, and of automata by the states of slots, after guesses of all kinds; odd sizes of vocabularies."""
    torch.manual_seed(0)
    for vocab in (1, 31, 300, 2049, 5000):
        num_words = -(-vocab // 32)
        words = torch.randint(-(2**31), 2**31 - 1, (3, num_words), device=device).int()
        logits, rows = torch.randn(5, vocab, device=device), torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
        want = logits.clone()
        apply_bitmask_torch(want, rows, words)
        apply_bitmask_triton(logits, rows, words)
        assert torch.equal(logits, want)

        num_states, num_classes = 4, 3
        masks = torch.randint(-(2**31), 2**31 - 1, (num_states, num_words)).int()
        parts = [masks, torch.randint(0, num_classes, (vocab,)).int()]
        parts += [torch.randint(-1, num_states, (num_states, num_classes)).int()]
        pool = torch.cat([torch.zeros(7, dtype=torch.int32), *(part.view(-1) for part in parts)]).to(device)
        classes = 7 + masks.numel()
        place = torch.tensor([7, classes, classes + vocab, num_classes], dtype=torch.int32, device=device)
        places, states = place.repeat(6, 1), torch.tensor([0, 1, -1, 3, 2, 1], dtype=torch.int32, device=device)
        for most in (0, 2):
            num_guesses = torch.tensor([0, 2, 1, 2])[:, None].clamp(max=most)
            ends = torch.cumsum(num_guesses + 1, 0)
            firsts = ends - num_guesses - 1
            slots, guesses = torch.tensor([[3], [0], [2], [5]]), torch.randint(0, vocab, (4, most))
            table = torch.cat([slots, firsts + 1, firsts, num_guesses, guesses], 1).int().to(device)
            logits = torch.randn(int(ends[-1]), vocab, device=device)
            want = logits.clone()
            mask_states_torch(want, table, places, states, pool)
            mask_states_triton(logits, table, places, states, pool)
            assert torch.equal(logits, want)
            for right in (True, False):
                token_ids = torch.randint(-1, vocab, (int(ends[-1]) + 1,)).int()
                for first, row_guesses, n in zip(firsts.tolist(), guesses, num_guesses[:, 0].tolist(), strict=True):
                    if right:
                        token_ids[first[0] + 1 :][:n] = row_guesses[:n]
                got, expected, token_ids = states.clone(), states.clone(), token_ids.to(device)
                advance_states_torch(token_ids, table, places, expected, pool)
                advance_states_triton(token_ids, table, places, got, pool)
                assert torch.equal(got, expected)


def check_scatter_writes(device: torch.device = CPU) -> None:
    """Runs of all lengths around a program's, next to each other; the values between them stay."""
    generator = np.random.default_rng(0)
    for lengths in ([1], [1023, 1, 1024, 1025, 0, 3000], [1] * 40, [2] * 1030, []):
        gaps = generator.integers(0, 3, len(lengths) + 1)
        places = np.cumsum(gaps[:-1] + [0, *lengths[:-1]][: len(lengths)])
        values = torch.randint(-(2**31), 2**31 - 1, (sum(lengths) + 3,), device=device).int()
        head = torch.tensor([len(lengths), *places.tolist(), *lengths], dtype=torch.int32, device=device)
        state = torch.full((7000,), 7, dtype=torch.int32, device=device)
        twin = state.clone()
        scatter_writes(state, torch.cat((head, values)), len(lengths))
        scatter_writes_torch(twin, torch.cat((head, values)))
        assert torch.equal(state, twin)
        assert (state == 7).all() == (not sum(lengths))


def check_graph_io(device: torch.device = CPU) -> None:
    """Inputs of several graphs in turn, with and without writes, with repeats, and more inputs than entries."""
    generator, num_entries = np.random.default_rng(0), 4
    sizes = {"dtype": torch.int32, "pin_memory": device.type == "cuda"}
    input_ring, answers = torch.zeros((num_entries, 12_000), **sizes), torch.zeros((num_entries, 9000), **sizes)
    control, rows, state = (torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 4096, 5000))
    twins = [x.clone() for x in (control, rows, state)]
    twin_answers = answers.clone()
    graphs = (1, 1, 1), (4, 1, 5), (2, 6, 1), (1000, 1, 3), (1, 1, 64), (40, 9, 1)
    for number, (size, count, repeats) in enumerate(graphs):
        num_ints, n = 2 * size * (1 + count), size * count
        num_writes = int(generator.integers(0, 60)) * (number % 2)
        lengths = generator.integers(0, 80, num_writes).tolist()
        places = np.cumsum([0, *lengths])[:-1].tolist()
        values = generator.integers(-9, 9, sum(lengths)).tolist()
        body = [repeats, num_writes, *generator.integers(0, 99, num_ints).tolist(), *places, *lengths, *values]
        input_ring[number % num_entries, : len(body)] = torch.tensor(body, dtype=torch.int32)
        for _ in range(repeats):
            token_ids = torch.randint(-1, 1000, (n,), dtype=torch.int32).to(device)
            read_input(input_ring, control, rows[:num_ints], state)
            write_output(token_ids, control, rows[:num_ints], answers)
            read_input_torch(input_ring, twins[0], twins[1][:num_ints], twins[2])
            write_output_torch(token_ids, twins[0], twins[1][:num_ints], twin_answers)
            for got, want in zip((control, rows, state), twins, strict=True):
                assert torch.equal(got, want)
            if device.type == "cuda":
                torch.cuda.synchronize()
            assert torch.equal(answers, twin_answers)
        assert control.tolist()[:2] == [(number + 1) % num_entries, 0]


def check_inputs(device: torch.device = CPU) -> None:
    """Decode rows alone, short rows, and long rows among them, with the padding of a graph."""
    num_slots, max_len, block_size = 200, 400, 16
    state = torch.randint(1, 2**31 - 1, (num_slots + 1, max_len + 50 + 3), dtype=torch.int32, device=device)
    tables = state[:, max_len : max_len + 50]  # of two groups
    tables.copy_(torch.randint(0, 10_000, tables.shape))
    state[num_slots] = 0
    for counts in ([1], [1] * 150, [3, 1, 8, 2], [1, 1, 129, 128, 1, 300]):
        starts = np.array([(37 * i) % (max_len - c) for i, c in enumerate(counts)], np.int32)
        slots = np.random.default_rng(1).permutation(num_slots)[: len(counts)].astype(np.int32)
        slots[-1], starts[-1] = (num_slots, 0) if counts[-1] == 1 else (slots[-1], starts[-1])
        edges = np.cumsum([0, *counts]).astype(np.int32)
        rows = [torch.from_numpy(x).to(device) for x in (slots, starts, edges)]
        args = (*rows, state[:, :max_len], tables[:, :25], block_size, int(edges[-1]), max(counts))
        own_counts = torch.tensor([1 + 5 * i % c for i, c in enumerate(counts)], dtype=torch.int32, device=device)
        adapters = state[:, max_len + 51]
        of_two = (*args[:4], tables, *args[5:])
        deltas = state[:, max_len + 52]
        for args_of, more in (
            (args, (own_counts, adapters)), (args, (None, adapters)), (of_two, (None, adapters, 2)),
            (args, (own_counts, None, 1, deltas)),
        ):  # fmt: skip
            for got, want in zip(build_inputs(*args_of, *more), build_inputs_torch(*args_of, *more), strict=True):
                if got is None:
                    assert want is None
                    continue
                assert got.dtype == torch.int32
                assert torch.equal(got, want)
        assert build_inputs(*args)[3] is None


def make_state(num_slots: int, temperatures: list[float], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of tokens and parameters, slots after slots of these temperatures, with random seeds."""
    state = torch.zeros((num_slots + 1, 40 + NUM_PARAMS), dtype=torch.int32, device=device)
    tokens, params = state[:, :40], state[:, 40:]
    cycle = torch.tensor([temperatures[i % len(temperatures)] for i in range(num_slots + 1)])
    params[:, TEMPERATURE] = cycle.view(torch.int32)
    params.view(torch.float32)[:, TOP_P] = 1.0
    params[:, 1:3] = torch.randint(-(2**31), 2**31 - 1, (num_slots + 1, 2)).int()
    return tokens, params


def check_sample(device: torch.device = CPU, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)) -> None:
    """Greedy and drawn rows, ties and both zeros, a row's answer alone and among others, rows that are not finite."""
    torch.manual_seed(0)
    tokens, params = make_state(9, [0.0, 1.0, 0.7, 2.0, 0.01], device)
    slots = torch.arange(10, dtype=torch.int32, device=device)
    positions = torch.tensor([3, 1, 9, 39, 5, 1, 7, 7, 2, 1], dtype=torch.int32, device=device)
    for dtype in dtypes:
        for vocab in (1, 20, 2048, 5001):
            logits = (torch.randn(10, vocab, device=device) * 3).to(dtype)
            logits[5] = logits[5].round()  # ties
            logits[0] = torch.where(torch.arange(vocab, device=device) % 2 == 0, -0.0, 0.0)
            want = sample_tokens_torch(logits, slots, positions, tokens, params)
            expected = tokens.clone()
            tokens.fill_(-5)
            got = sample_tokens_triton(logits, slots, positions, tokens, params)
            assert got.tolist() == want.tolist()
            assert torch.equal(tokens[slots.long(), positions.long()], expected[slots.long(), positions.long()])
            assert (tokens == -5).sum() == tokens.numel() - 10
            alone = [sample_tokens_triton(logits[i : i + 1], slots[i : i + 1], positions[i : i + 1], tokens, params)
                     for i in range(10)]  # fmt: skip
            assert torch.cat(alone).tolist() == want.tolist()
            for row, value in ((1, torch.nan), (4, torch.inf), (7, -torch.inf)):
                logits[row, vocab // 2] = value
            want[[1, 4, 7]] = -1
            got = sample_tokens_triton(logits, slots, positions, tokens, params)
            assert got.tolist() == want.tolist()
            assert tokens[[1, 4, 7], positions[[1, 4, 7]].long()].tolist() == [0, 0, 0]

            rows = torch.tensor([8, 2, 7, 0], dtype=torch.int32, device=device)  # once more: 7 has failed and stays so
            own = torch.randn(4, vocab, device=device)
            own[:, : vocab // 2] = -torch.inf
            answers = []
            for sample_tokens in (sample_tokens_torch, sample_tokens_triton):
                resample = Resample(got.clone(), rows, gathered=True)
                where = slots[rows.long()], positions[rows.long()]
                answers.append(sample_tokens(own, *where, tokens, params, resample).tolist())
                assert tokens[where[0].long(), where[1].long()].tolist() == [max(answers[-1][i], 0) for i in rows]
            assert answers[0] == answers[1]
            assert answers[0][7] == -1
            assert all(i == 7 or answers[0][i] >= vocab // 2 for i in rows.tolist())

            whole = torch.randn(10, vocab, device=device).to(dtype)  # again, in the place where all logits are
            whole[:, : vocab // 2] = -torch.inf
            twins = [Resample(got.clone(), rows, gathered=False) for _ in range(2)]
            sample_tokens_torch(whole, *where, tokens, params, twins[0])
            sample_tokens_triton(whole, *where, tokens, params, twins[1])
            assert twins[0].token_ids.tolist() == twins[1].token_ids.tolist()
            assert all(i == 7 or int(twins[1].token_ids[i]) >= vocab // 2 for i in rows.tolist())


def survivors(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [vocab] bool masks in float64: tokens that survive by definition, and tokens that may. The latter are at a
    limit that fp32 cannot decide for a sum of probabilities, or for min_p's logarithm."""
    logits = logits.double()
    certain, possible = (torch.ones_like(logits, dtype=torch.bool) for _ in range(2))
    if top_k:
        certain &= logits >= logits.sort(descending=True).values[min(top_k, len(logits)) - 1]
        possible &= certain
    if top_p < 1.0:
        ordered, order = (logits.masked_fill(~certain, -torch.inf)).sort(descending=True)
        mass = (ordered - ordered[0]).exp()
        above = mass.cumsum(0) - mass
        first_equal = torch.searchsorted(-ordered, -ordered)  # ties survive together
        above = above[first_equal] / mass.sum()
        best = ordered == ordered[0]
        certain[order] &= (above < top_p * (1 - 1e-5)) | best
        possible[order] &= (above < top_p * (1 + 1e-5)) | best
    floor = logits.max() + np.log(min_p) if min_p else -torch.inf
    return certain & (logits >= floor + 1e-5), possible & (logits >= floor - 1e-5)


def check_filters(device: torch.device = CPU, vocabs: tuple[int, ...] = (1, 100, 9000)) -> None:
    """Random filters on flat, usual, sharp, tied and partly banned logits: the best scored of the tokens that survive
    by definition. A row gives the same token alone and when it is sampled again."""
    torch.manual_seed(0)
    filters = [
        (k, p, m)
        for k in (0, 0, 1, 3, 50, 300, 4000)
        for p in (1.0, 0.999, 0.9, 0.5, 0.01, 1e-45)
        for m in (0.0, 0.0, 0.1, 1.0)
    ]
    for vocab in vocabs:
        for spread in (0.01, 3.0) if device == CPU else (0.01, 3.0, 10.0):
            chosen = [filters[i] for i in torch.randperm(len(filters))[: len(filters) if device != CPU else 8]]
            n = len(chosen)
            tokens, params = make_state(n, [0.7, 1.0, 0.0], device)
            for column, values in zip((TOP_K, TOP_P, MIN_P), zip(*chosen, strict=True), strict=True):
                of_slots = torch.tensor(values, dtype=torch.int32 if column == TOP_K else torch.float32)
                params[:n, column] = of_slots.view(torch.int32).to(device)
            logits = torch.randn(n, vocab) * spread
            logits[::3] = logits[::3].round()
            logits = logits.to(device)
            masked = logits.clone()
            if vocab > 1:
                masked[1::3, vocab // 2 :] = -torch.inf
            slots = torch.arange(n, dtype=torch.int32, device=device)
            positions = torch.randint(0, 40, (n,)).int().to(device)
            state = slots, positions, tokens, params
            got = sample_tokens_triton(logits, *state)
            again = {gathered: Resample(got.clone(), slots, gathered) for gathered in (False, True)}
            for each in again.values():
                sample_tokens_triton(masked, *state, resample=each)
            assert again[False].token_ids.tolist() == again[True].token_ids.tolist()
            floats = params.view(torch.float32)
            seeds = params[:n, SEED_HIGH].long() << 32 | params[:n, SEED_LOW].long() & 0xFFFFFFFF
            ids = torch.arange(vocab, dtype=torch.int32, device=device)
            noise = gumbel_noise(noise_keys(seeds, positions)[:, :, None], ids)
            for all_logits, answers in ((logits, got), (masked, again[True].token_ids)):
                for row in range(n):
                    answer, temperature = int(answers[row]), float(floats[row, TEMPERATURE])
                    if temperature == 0.0:
                        assert answer == int(all_logits[row].argmax())
                        continue
                    scaled = all_logits[row] / temperature
                    certain, possible = survivors(scaled, *chosen[row])
                    assert possible[answer]
                    scores = scaled + noise[row]
                    assert scores[answer] >= scores[certain].max() - 1e-5 if certain.any() else True
            few = slice(2, 6)
            assert (
                sample_tokens_triton(logits[few], slots[few], positions[few], tokens, params).tolist()
                == got[few].tolist()
            )


def check_penalties(device: torch.device = CPU, vocabs: tuple[int, ...] = (1, 50, 5000), rounds: int = 6) -> None:
    """Rows with and without penalties, more rows than tables. Their few or many tokens may repeat in the prompt, in the
    output, or in both. Logits equal the twin's bit by bit, and the tables are empty again."""
    num_slots, max_len = NUM_TABLES + 5, 4200
    state = torch.zeros((num_slots + 1, max_len + NUM_PARAMS), dtype=torch.int32)
    tokens, params = state[:, :max_len], state[:, max_len:]
    floats = params.view(torch.float32)
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        vocab = vocabs[seed % len(vocabs)]
        n = int(rng.integers(1, 6)) if seed % 3 else num_slots + 1
        tables = torch.zeros((NUM_TABLES, vocab), dtype=torch.int32, device=device)
        tokens.copy_(torch.from_numpy(rng.integers(0, rng.integers(1, vocab + 1), tokens.shape)))
        for column, values in (
            (REPETITION, (1.0, 1.1, 0.7, 100.0)),
            (FREQUENCY, (0.0, 0.3, -2.0)),
            (PRESENCE, (0, 0.7)),
        ):
            floats[:, column] = torch.from_numpy(rng.choice(np.array(values, np.float32), num_slots + 1))
        state[num_slots, max_len:] = 0  # the padding's
        lengths = np.minimum(rng.integers(1, (20, 300, max_len)[seed % 3], n), max_len - 1)
        slots = torch.from_numpy(rng.permutation(num_slots + 1)[:n]).int()
        positions = torch.from_numpy(lengths).int()
        params[slots.long(), PROMPT_LEN] = torch.from_numpy(rng.integers(1, lengths + 1)).int()
        offsets = torch.from_numpy(rng.integers(-2, 2, n)).int()
        from_here = (positions + offsets).clamp(min=1) * torch.from_numpy(rng.integers(0, 2, n)).int()
        params[slots.long(), PENALISED_FROM] = from_here * (slots < num_slots)
        logits = torch.from_numpy(rng.normal(size=(n, vocab)).astype(np.float32)) * 3
        logits[:, ::7] = -torch.inf
        for all_rows in (False, True):
            floats[num_slots, REPETITION] = float(all_rows)  # the padding is never sampled again
            on_device = state.to(device)
            want, got = logits.clone(), logits.to(device)
            penalise_torch(want, slots, positions, tokens, params, all_rows)
            where = slots.to(device), positions.to(device)
            penalise_triton(got, *where, on_device[:, :max_len], on_device[:, max_len:], all_rows, tables)
            changed = {i for i in range(n) if not torch.equal(want[i], logits[i])}
            due = (positions >= from_here) & (from_here > 0) | all_rows
            assert changed <= set((due & (slots < num_slots)).nonzero().flatten().tolist())
            assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))
            assert not tables.any()


def draw_params(rng: np.random.Generator) -> SamplingParams:
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    return SamplingParams(
        max_tokens=32,
        temperature=pick(0.0, 0.0, 0.7, 1.0, 2.0),
        top_k=pick(0, 0, 1, 5),
        top_p=pick(1.0, 1.0, 0.5),
        min_p=pick(0.0, 0.0, 0.2),
        repetition_penalty=pick(1.0, 1.0, 1.3),
        frequency_penalty=pick(0.0, 0.0, 0.5),
        presence_penalty=pick(0.0, -0.5),
        logit_bias=pick((), (), ((3, 2.0), (7, -100.0)), ((2**31 - 1, 1.0),)),
        allowed_token_ids=pick((), (), (), (7, 3, 5, 3)),
        min_tokens=pick(0, 0, 4),
        stop_token_ids=pick((), (5, 6), (2**31 - 1,)),
        ignore_eos=pick(True, False),
        logprobs=pick(None, None, 0, 3),
        logprob_token_ids=pick((), (), (4,), (9, 2, 2**31 - 1)),
    )


def check_sampler(device: torch.device = CPU, rounds: int = 12, vocab: int = 50) -> None:
    """Random requests through both samplers, several steps: the same tokens and log-probabilities."""
    num_slots, max_len = 10, 40
    for seed in range(rounds):
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        twin, slots = Sampler(num_slots, vocab, (EOS,), CPU), Slots(num_slots, max_len, 4, CPU)
        sampler = DeviceSampler(num_slots, vocab, (EOS,), Transfers(device))
        state = torch.zeros((num_slots + 1, max_len + NUM_PARAMS), dtype=torch.int32, device=device)
        tokens, params = state[:, :max_len], state[:, max_len:]
        lengths = rng.integers(1, 9, num_slots).astype(np.int32)
        for slot in range(num_slots):
            known = rng.integers(0, vocab, lengths[slot]).astype(np.int32)
            prompt_len = int(rng.integers(1, len(known) + 1))
            drawn = SamplingParams(temperature=1.0) if seed == 0 else draw_params(rng)
            new = NewSlot(slot, known, prompt_len, int(rng.integers(2**63)), drawn)
            twin.add(new)
            slots.add(new)
            params[slot] = torch.from_numpy(sampler.add(new)).to(device)
            tokens[slot, : len(known)] = torch.from_numpy(known).to(device)
        for step in range(4):
            rows = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].astype(np.int32)
            positions = lengths[rows]
            logits = torch.randn(len(rows), vocab) * 4
            if step == 2:
                logits[0, 3] = torch.nan
            want, want_logprobs = twin.sample(logits.clone(), rows, positions, slots)
            at = torch.from_numpy(rows.astype(np.int64) * max_len + positions)
            slots.write_sampled(at, want)
            where = torch.from_numpy(rows).to(device), torch.from_numpy(positions).to(device)
            on_device = logits.to(device, copy=True)
            got = sampler.sample(on_device, *where, tokens, params)
            plain, logprobs = sampler.is_plain(rows, positions), None
            assert plain or seed
            if not plain:
                logprobs = sampler.resample(on_device, got, rows, positions, tokens, params)
            again = sampler.penalised[rows] & ~sampler.wants_second_pass(rows, positions)
            stay = torch.from_numpy(~again)  # all others are the model's own still
            assert torch.equal(on_device.cpu()[stay], logits[stay]) or step == 2
            assert got.tolist() == want.tolist()
            assert torch.equal(tokens.cpu()[:-1], slots.tokens)
            lengths[rows] += 1
            assert (logprobs is None) == (want_logprobs is None)
            if logprobs is not None:
                good = (want[torch.from_numpy(logprobs.rows).long()] >= 0).tolist()
                assert logprobs.rows.tolist() == want_logprobs.rows.tolist()
                for name in ("ranks", "logprobs", "top_ids", "top_logprobs"):
                    pair = getattr(logprobs, name).cpu()[good], getattr(want_logprobs, name)[good]
                    torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)
