"""The engine's decode speed and throughput in this process: random weights in a published shape, EOS off.

    python -m benchmarks.engine.decode --model llama-3.2-1b --cells 1x128x512 8x128x256 256x128x256 256x512x128
    python -m benchmarks.engine.decode --model llama-3.2-3b --cells 1x128x512 48x128x256 \\
        --sampling temperature=0 temperature=0.8,top_p=0.9 temperature=0.8,top_p=0.9,repetition_penalty=1.1
    python -m benchmarks.engine.decode --model llama-3.1-8b --set tensor_parallel_size=2        # a GPU for each rank

A cell is BATCHxINxOUT, all requests added at once. Each is measured with every `--sampling`, on one engine. If greedy
comes first, its share of the greedy rate is given. Random weights give nearly flat logits, the worst case for
filters; `--logit-scale` makes them more peaked. Decode tok/s counts the tokens after every request has its first one,
over the time from then on. Output tok/s counts all tokens over the whole time, prefill included. Figures are medians
over the repeats.
"""

from __future__ import annotations

import json

import numpy as np
from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, middle, new_parser, percentiles


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cells", nargs="+", default=["1x128x512"], metavar="BATCHxINxOUT")
    parser.add_argument("--sampling", nargs="+", default=["temperature=0"], metavar="FIELD=VALUE,...")
    parser.add_argument("--logit-scale", type=float, default=1.0, help="factor of the final norm's weight")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs after one to warm up; 0: it is timed")
    args = parser.parse_args()
    cells = [tuple(int(n) for n in cell.split("x")) for cell in args.cells]
    largest = max(batch for batch, _, _ in cells)
    config = engine_config(args.set, **({"max_num_seqs": largest} if largest > 256 else {}))
    results = Results("decode", args.out)
    greedy: dict[tuple[int, ...], float] = {}  # decode tok/s by cell
    engine = Engine(args.model, config)
    if args.logit_scale != 1:
        engine.runner.decoder.final_norm.mul_(args.logit_scale)
    cases = [(cell, text) for cell in cells for text in args.sampling]
    with tqdm(total=len(cases) * (args.repeats + 1), unit="run") as bar:
        for (batch, prompt_len, output_len), text in cases:
            engine.sampling = {name: json.loads(value) for name, value in (f.split("=") for f in text.split(","))}
            bar.set_description(f"{args.model} {batch} x ({prompt_len} in, {output_len} out)")
            runs = []
            for repeat in range(args.repeats + 1):
                run = engine.run(batch, prompt_len, output_len)
                runs += [run] if repeat or not args.repeats else []
                bar.update()
            decode, decode_range = middle([run.decode_rate for run in runs])
            output, output_range = middle([run.output_rate for run in runs])
            if text == "temperature=0":
                greedy[batch, prompt_len, output_len] = decode
            rate = greedy.get((batch, prompt_len, output_len))
            steps = np.concatenate([np.diff(run.step_ends) for run in runs])
            results.add(
                config, model=args.model, sampling=text, logit_scale=args.logit_scale, batch=batch,
                prompt_len=prompt_len, output_len=output_len, repeats=args.repeats,
                decode_tok_s=decode, decode_range=decode_range, of_greedy=rate and decode / rate,
                output_tok_s=output, output_range=output_range, step_ms=percentiles(steps),
                first_token_ms=middle([run.first * 1e3 for run in runs])[0],
            )  # fmt: skip


if __name__ == "__main__":
    main()
