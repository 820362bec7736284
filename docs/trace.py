"""Follow one `callboard generate` through the core: every plan, its result, and the text.

python docs/trace.py                                # the default model
python docs/trace.py MODEL "a prompt" 6             # at most 6 tokens
"""

import sys

from callboard import LLM, SamplingParams
from runtime.base.config import DEFAULT_MODEL
from runtime.core.plan import StepPlan, StepResult


def shown(plan: StepPlan) -> str:
    """The parts of a plan that it has, in the order in which a runner applies them."""
    parts = [f"free slot {slot}" for slot in plan.freed]
    parts += [f"open slot {new.slot} with tokens {new.token_ids.tolist()}" for new in plan.new]
    parts += [f"slot {slot}: table[{at}] = block {block}" for slot, at, block in plan.block_table_writes.T]
    rows = zip(plan.slots, plan.num_computed, plan.ends, plan.num_samples, strict=True)
    parts += [f"row of slot {slot}: positions {start}..{end - 1}, samples {n}" for slot, start, end, n in rows]
    return "\n          ".join(parts)


def main(model: str = DEFAULT_MODEL, prompt: str = "Once upon a time", max_tokens: str = "4") -> None:
    llm = LLM(model)
    executor = llm.engine.executor
    submit, collect = executor.submit, executor.collect

    def traced_submit(plan: StepPlan) -> None:
        print(f"plan {plan.step_id:3}  {shown(plan)}")
        submit(plan)

    def traced_collect() -> StepResult:
        result = collect()
        texts = [llm.tokenizer.decode([i]) for i in result.token_ids.tolist()]
        print(f"result {result.step_id:1}  tokens {result.token_ids.tolist()} {texts}")
        return result

    executor.submit, executor.collect = traced_submit, traced_collect
    pieces = llm.stream(prompt, SamplingParams(max_tokens=int(max_tokens), temperature=0.0))
    for piece in pieces:
        print(f"text      {piece!r}")
    print(f"counters  {llm.engine.stats()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
