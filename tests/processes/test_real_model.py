"""A real model behind the server answers OpenAI's client and other Ray jobs. Its scores in lm-eval equal transformers'
scores with the same GGUF file on the same local tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
from pydantic import BaseModel

from tests.support.processes.ready import wait_for_model

MODEL = "smollm2"
ROOT = Path(__file__).parents[2]
PROMPT = "def fibonacci(n):\n"
CHOICES = [
    ("The capital of France is", ["Paris", "Berlin", "a kind of cheese", "Rome"], 0),
    ("Two plus two equals", ["five", "four", "22"], 1),
    ("Water freezes at a temperature of", ["100 degrees Celsius", "0 degrees Celsius"], 1),
    ("The opposite of hot is", ["cold", "warm", "spicy"], 0),
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Wörld peace, naïve café: 漢字 and 🙂 too.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "In the beginning there was nothing, which exploded. " * 12,
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "endings": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def url(serve_url):
    from ray import serve

    from callboard.app import AppArgs, build_app

    args = AppArgs(
        served_model_name=MODEL,
        deterministic=True,
        dtype="float32",
        max_num_seqs=8,
        kv_cache_memory=0.2,
        kv_tier_memory=0,
        max_model_len=1024,
    )
    serve.run(build_app(args), name="callboard")
    wait_for_model(serve_url, MODEL)
    yield serve_url
    serve.delete("callboard")


def test_the_openai_client_reads_plain_and_streamed_answers(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [m.id for m in client.models.list()] == [MODEL]
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    plain = client.chat.completions.create(model=MODEL, messages=question, temperature=0)
    assert plain.choices[0].message.content == "The capital of France is Paris."
    assert plain.choices[0].finish_reason == "stop"
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (42, 8)
    chunks = list(client.chat.completions.create(model=MODEL, messages=question, temperature=0, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "The capital of France is Paris."
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0.8, seed=3)
    parts = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0.8, seed=3, stream=True)
    assert "".join(c.choices[0].text for c in parts) == whole.choices[0].text
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL, prompt=[5] * 2000)


class Person(BaseModel):
    name: str
    age: int


def test_structured_answers_fit_their_schema(url):
    """Extraction with OpenAI's client: plain, streamed, and as a pydantic model."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked = "John is 30 years old. Give the person's name and age as JSON."
    body = {"model": MODEL, "messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": 60}
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    plain = client.chat.completions.create(**body, response_format=form)
    assert json.loads(plain.choices[0].message.content) == {"name": "John", "age": 30}
    assert plain.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**body, response_format=form, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
    parsed = client.chat.completions.parse(**body, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="John", age=30)
    cut = client.chat.completions.create(**body, response_format=form, stop=[","], logprobs=True)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ('{"name": "John"', "stop")
    assert "".join(entry.token for entry in cut.choices[0].logprobs.content).startswith('{"name": "John"')
    many = client.chat.completions.create(**body | {"temperature": 1.5}, response_format=form, n=8, seed=1)
    ended = [c.message.content for c in many.choices if c.finish_reason == "stop"]
    assert ended
    for text in ended:
        Person.model_validate_json(text)
    with pytest.raises(openai.BadRequestError, match="contains"):
        client.chat.completions.create(
            **body, response_format={"type": "json_schema", "schema": {"contains": {"type": "string"}}}
        )


@pytest.mark.rotated
def test_another_ray_job_streams_through_the_handle(url):
    import ray

    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "docs" / "handle_call.py"),
            "What is the capital of France? Answer in one sentence.",
        ],
        env=os.environ
        | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "The capital of France is Paris.", done.stderr


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Scores of a model of lm-eval: for each doc of a task (log-likelihood, is greedy) pairs, or one rolling score."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.tasks import TaskManager

    rows = {"choices": [{"question": q, "choices": c, "answer": a} for q, c, a in CHOICES]}
    rows |= {"endings": rows["choices"], "texts": [{"text": text} for text in TEXTS]}
    for name, task in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path)}
        head = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test"}
        lines = [f"{key}: {json.dumps(value)}\n" for key, value in head.items()]
        (tmp_path / f"{name}.yaml").write_text("".join(lines) + task)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(model):
        samples = lm_eval.simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)["samples"]
        docs = {task: sorted(samples[task], key=lambda doc: doc["doc_id"]) for task in TASKS}
        return {task: [doc["filtered_resps"] for doc in docs[task]] for task in TASKS}

    return run


@pytest.mark.thorough  # products of the file's weights with int16 activations err by up to 9e-5
def test_loglikelihoods_equal_transformers(url, evaluate, smollm2_path: Path, tmp_path: Path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = smollm2_path.parent, smollm2_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    want = evaluate(HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=1, max_length=256))
    ours = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=MODEL, tokenizer=str(tmp_path / "tokenizer"),
        tokenizer_backend="huggingface", num_concurrent=4, max_length=256 + 1,
    )  # fmt: skip
    for _ in range(2):  # the second time every prompt is in the prefix cache
        got = evaluate(ours)
        for task in ("choices", "endings"):
            for mine, wanted in zip(got[task], want[task], strict=True):
                assert [greedy for _, greedy in mine] == [greedy for _, greedy in wanted]
                scores = [score for score, _ in wanted]
                assert [score for score, _ in mine] == pytest.approx(scores, rel=2e-4, abs=2e-3)
        for mine, wanted in zip(got["texts"], want["texts"], strict=True):
            assert mine == pytest.approx(wanted, rel=2e-4, abs=4e-3)
