"""Another Ray job calls a running Callboard through its Serve handle and streams tokens: no HTTP in between.

    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...   # any secret, the same in two terminals of one machine
    callboard serve                                 # in the first one; or: serve run callboard.app:build_app
    python docs/handle_call.py "Hi!"                # in the second one

Where several Ray clusters run on the machine, RAY_ADDRESS=HOST:PORT chooses one; otherwise Ray takes any of them.
"""

import os
import sys
from pathlib import Path

from actors.ray.environment import SINGLE_MACHINE

# This process needs the server's settings of Ray before `import ray`. A Ray that `serve run` has started needs the
# token that it left in the home directory.
os.environ.update(
    {**SINGLE_MACHINE, "RAY_AUTH_MODE": "token" if Path("~/.ray/auth_token").expanduser().exists() else "disabled"}
    | dict(os.environ)
)

import ray
from ray import serve


def main() -> None:
    ray.init(address="auto", log_to_driver=False)
    applications = serve.status().applications.items()  # its own name by `callboard serve`, else "default"
    name = next(name for name, application in applications if {"Front", "Engine"} <= application.deployments.keys())
    handle = serve.get_app_handle(name).options(stream=True)
    prompt = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "max_tokens": 64, "temperature": 0, "stream": True}
    for chunk in handle.chat.remote(body):
        print(chunk["choices"][0]["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
