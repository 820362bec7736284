"""Many engines on a virtual clock: the real scheduler, block pool, prefix cache, router and scaling policy. Step
times were measured on one H200 (step_times.py). All figures are simulated.

    python -m benchmarks.simulate capacity                # 8 engines near capacity, by policy of routing
    python -m benchmarks.simulate engines                 # 1,000 engines for 10 minutes at 2,000 requests a second
    python -m benchmarks.simulate wave                    # a square wave under the scaling policy
    python -m benchmarks.simulate measured                # one engine against what a server on an H200 has shown
    python -m benchmarks.simulate trace FILE --engines 8  # Mooncake's (.jsonl) or Azure's (.csv), by policy of routing

Workloads are generated, with lengths as published (traces.py), but for `trace`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.library.measure import Results, new_parser
from benchmarks.simulate.cluster import Cluster, Shape
from benchmarks.simulate.measured import MEASURED, compare
from benchmarks.simulate.scenarios import capacity, figures, many_engines, play, square_wave
from benchmarks.simulate.step_times import MODELS
from benchmarks.simulate.traces import azure, mooncake

POLICIES = ("round-robin", "least-load", "prefix", "foresight", "oracle")


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("scenario", choices=("capacity", "engines", "wave", "measured", "trace"))
    parser.add_argument("file", nargs="?", type=Path, help="of a trace")
    parser.add_argument("--engines", type=int, help="how many (engines 1000, trace 8)")
    parser.add_argument("--seconds", type=float, help="of the simulation (capacity 90, engines 600, half a wave 200)")
    parser.add_argument("--rate", type=float, default=2000.0, help="requests a second (engines)")
    parser.add_argument("--workloads", nargs="+", default=["assistants", "shared-prefix"], help="of capacity")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES[1:])
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than it was a trace is played")
    parser.add_argument("--merge", action=argparse.BooleanOptionalAction, default=True, help="plan equal steps at once")
    args = parser.parse_args()
    results = Results(f"simulate {args.scenario}", args.out)
    if args.scenario == "capacity":
        for workload in args.workloads:
            for policy in args.policies:
                found = capacity(workload, policy, args.seconds or 90.0, 4.0, 60.0, 6)
                results.add(simulated=True, workload=workload, policy=policy, engines=8, **found)
    elif args.scenario == "engines":
        found = many_engines(args.engines or 1000, args.seconds or 600.0, args.rate, args.merge)
        results.add(simulated=True, workload="chat", rate=args.rate, merge=args.merge, **found)
    elif args.scenario == "wave":
        results.add(simulated=True, workload="chat", **square_wave(3, args.seconds or 200.0, 2.0, 50.0))
    elif args.scenario == "measured":
        for workload in MEASURED:
            results.add(simulated=True, **compare(workload, args.merge))
    else:
        for policy in args.policies:
            conversations = mooncake(args.file) if args.file.suffix == ".jsonl" else azure(args.file)
            for conversation in conversations:
                conversation.start /= args.speed
            cluster = Cluster(Shape(MODELS["llama-3.1-8b"], args.engines or 8, 20_000, policy=policy, merge=args.merge))
            cpu_s = play(cluster, conversations)
            found = figures(cluster) | {"cpu_s": cpu_s}
            results.add(simulated=True, workload=args.file.name, policy=policy, engines=args.engines or 8, **found)


if __name__ == "__main__":
    main()
