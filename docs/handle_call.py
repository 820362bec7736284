"""Another Ray job calls a running Callboard through its Serve handle and streams tokens: no HTTP in between.

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...   # any secret, the same in two terminals of one machine
callboard serve                                 # in the first one
python docs/handle_call.py "Hi!"                # in the second one

Where several Ray clusters run on the machine, RAY_ADDRESS=HOST:PORT says which one; otherwise Ray takes any of them.
"""

import os
import sys

from actors.environment import SINGLE_MACHINE

os.environ.update(SINGLE_MACHINE)  # this process must talk to Ray as `callboard serve` does; before `import ray`

import ray
from ray import serve


def main() -> None:
    ray.init(address="auto", log_to_driver=False)
    handle = serve.get_app_handle("callboard").options(stream=True)
    prompt = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 64, "temperature": 0}
    for delta in handle.generate.remote(body):
        print(delta["text"], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
