"""`callboard ls`: the models that are stored on this machine."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("ls", help="list the stored models: their sizes, places and last use")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import time

    from runtime.loading.resolve import cache_folder
    from runtime.loading.sources.download import size_text
    from runtime.loading.sources.stored import stored_models

    models = stored_models(cache_folder())
    if not models:
        print("No model is stored; `callboard pull MODEL` fetches one.")
        return 0
    rows = [("NAME", "SIZE", "LAST USED", "WHERE")]
    for model in models:
        name = model.name if model.is_whole else f"{model.name} (incomplete)"
        used = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        rows.append((name, size_text(model.num_bytes), used, str(model.place)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}")
    print(f"{'':<{widths[0]}}  {size_text(sum(model.num_bytes for model in models)):>{widths[1]}}  in all")
    return 0
