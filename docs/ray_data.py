"""A Ray Data job sends rows through a running Callboard, with a bad row and a killed engine in it.

    pip install 'ray[data]==2.60.*'
    callboard serve                                  # or: serve run callboard.app:build_app
    python docs/ray_data.py --rows 1000 --kill

The job begins as docs/handle_call.py does, where Ray's token and address are explained.
"""

import argparse
import os
import signal
import time
from collections import Counter
from pathlib import Path

from actors.ray.environment import SINGLE_MACHINE

os.environ.update(
    {**SINGLE_MACHINE, "RAY_AUTH_MODE": "token" if Path("~/.ray/auth_token").expanduser().exists() else "disabled"}
    | dict(os.environ)
)

import ray
from ray import serve
from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

from actors.ray.directory import find_engines
from actors.ray.names import engines_of


def answer(row: dict) -> dict:
    """Return the columns to keep of an answer. Rows with an error skip this function."""
    choice, usage = row["choices"][0], row["usage"]
    return {
        "id": row["id"],
        "text": choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "num_tokens": usage["completion_tokens"],
    }


def kill_an_engine(application: str) -> None:
    """Send SIGKILL to an engine of the application, on the engine's machine."""
    engine = find_engines(engines_of(application))[-1]
    engine.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--kill", action="store_true", help="kill an engine when half of the rows are sent")
    args = parser.parse_args()
    ray.init(address="auto", namespace="serve", log_to_driver=False)
    applications = serve.status().applications.items()
    name = next(name for name, application in applications if {"Front", "Engine"} <= application.deployments.keys())

    def request(row: dict) -> dict:
        """Return a row's request. The first row is bad."""
        if args.kill and row["id"] == args.rows // 2:
            kill_an_engine(name)
        messages = [{"role": "user", "content": f"Write one sentence about the number {row['id']}."}]
        max_tokens = args.max_tokens if row["id"] else -9
        body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
        return {"id": row["id"], "method": "chat", "request_kwargs": body}

    config = ServeDeploymentProcessorConfig(
        deployment_name="Front",
        app_name=name,
        batch_size=32,  # an actor sends up to eight batches at once
        concurrency=1,  # actors that send
        should_continue_on_error=True,  # a bad row gets a column with its error, and the job goes on
    )
    processor = build_processor(config, preprocess=request, postprocess=answer)
    start = time.monotonic()
    rows = processor(ray.data.range(args.rows)).take_all()
    errors = [row["__inference_error__"] for row in rows if row["__inference_error__"]]
    tokens = Counter(row["num_tokens"] for row in rows if not row["__inference_error__"])
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s; answers by number of tokens: {dict(tokens)}")
    print(f"errors: {[error.strip().splitlines()[-1] for error in errors]}")


if __name__ == "__main__":
    main()
