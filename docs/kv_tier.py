"""A conversation that outlives its process: compute it, kill the process, start another one and ask again.

python docs/kv_tier.py                        # the default model
python docs/kv_tier.py MODEL 100000 cuda      # tokens, device
"""

import multiprocessing
import time
from multiprocessing.connection import Connection

from callboard import LLM, SamplingParams
from runtime.base.config import DEFAULT_MODEL
from runtime.tier.place import base_folder, forget

NAME = "kv-tier-demonstration"


def serve(requests: Connection, model: str, num_tokens: int, device: str) -> None:
    """Answer prompts of token ids, each with its next token and the seconds that it took."""
    llm = LLM(model, device=device, kv_tier_name=NAME, max_model_len=num_tokens + 64, deterministic=True)
    requests.send("ready")
    while True:
        prompt, begin = requests.recv(), time.perf_counter()
        (answer,) = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), progress=False)
        requests.send((answer.token_ids, answer.num_cached, time.perf_counter() - begin))


def main(model: str = DEFAULT_MODEL, num_tokens: str = "2000", device: str = "auto") -> None:
    context = multiprocessing.get_context("spawn")
    prompt = [5 + i * i % 211 for i in range(int(num_tokens))]
    try:
        for text in ("computed", "after kill -9"):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, model, len(prompt), device))
            process.start()
            ours.recv()
            ours.send(prompt)
            tokens, num_cached, seconds = ours.recv()
            print(f"{text}: token {tokens}, {num_cached} of {len(prompt)} tokens loaded, {seconds:.2f} s", flush=True)
            process.kill()
            process.join()
    finally:
        forget(base_folder(), NAME)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
