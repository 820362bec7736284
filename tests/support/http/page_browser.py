"""The page over a scripted engine, and the steps that its tests share."""

import threading
import time

import uvicorn
from playwright.sync_api import expect
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer

MODEL = "library/tiny-model"
ANSWER = "A **bow**:\n\n```python\nprint('<b>42</b>')\n```\nwith `n = 1.33` & <i>you</i>."
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="a {{b}} c",engine="0"}} 3
vllm:num_requests_running{{model_name="a {{b}} c",engine="1"}} 2.0
vllm:num_requests_waiting{{engine="0"}} 7
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:kv_cache_usage_perc{{engine="1"}} 0.625
vllm:generation_tokens_total{{engine="0"}} {generated}
vllm:prompt_tokens_total{{engine="0"}} 1e3
vllm:time_to_first_token_seconds_sum{{engine="0"}} {ttft_sum}
vllm:time_to_first_token_seconds_count{{engine="0"}} {count}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} 1
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5"}} {count}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {count}
"""


class Server:
    """The HTTP front over a scripted engine, on a thread of its own, with a /metrics that the test sets."""

    def __init__(self, settings: HttpSettings | None = None) -> None:
        self.engine = FakeEngine(ANSWER, group=3, delay_s=0.002, max_model_len=4096)
        self.metrics_at: list[float] = []
        self.service = Service(self.engine, byte_tokenizer(), MODEL)
        self.killed: list[str] = []  # roles of the processes that /chaos was to end
        app = build_http_app(self.service, settings, kill=self._kill)
        app.router.routes.insert(0, Route("/metrics", self._metrics))
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"

    def _metrics(self, request) -> PlainTextResponse:
        self.metrics_at.append(time.monotonic())
        seconds, count = self.metrics_at[-1] - self.metrics_at[0], 2 * len(self.metrics_at)
        text = METRICS.format(generated=5000 + 200 * seconds, count=count, ttft_sum=0.3 * count)
        return PlainTextResponse(text)

    async def _kill(self, role: str) -> dict[str, object]:
        self.killed.append(role)
        return {"engine": "a", "pid": 7}

    def answers(self, text: str, delay_s: float = 0.002) -> None:
        self.engine.script, self.engine.delay_s = [*text.encode(), 256], delay_s

    def prompt(self) -> str:
        """The prompt that the engine got last."""
        return bytes(self.engine.requests[-1].token_ids).decode()

    def until(self, condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)


def ask(page, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def open_settings(page, view: str = "chat") -> None:
    page.click(f"#{view} [aria-controls={view}-settings]")


def is_answered(page, times: int) -> None:
    expect(page.locator(".answer[aria-busy=false]")).to_have_count(times)
