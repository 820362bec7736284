"""The OpenAPI page is true: generated requests, right and wrong, get only responses that it declares."""

from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.python._constants.orchestrator import make_constants_value_source
from starlette.routing import Route

from runtime.base.model.pooling import Pooling
from runtime.base.weight_version import WeightVersion
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.examples import examples
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer

KEY = "a-key"


async def kill(role: str) -> dict[str, object]:
    """The scripted engine does not have processes."""
    return {"engine": "0", "pid": 7}


APP = build_http_app(
    Service(
        FakeEngine(max_model_len=1 << 16, pooling=Pooling("last", True, True), weights=WeightVersion()),
        byte_tokenizer(),
        MODEL,
    ),
    HttpSettings(api_key=(KEY,), max_body_bytes=1 << 20, lora_folder="/adapters", allow_chaos=True),
    kill=kill,
)

CONFIG = schemathesis.Config.from_dict(
    {
        "seed": 1,
        "request-timeout": 60,  # the first grammar waits until a child has started, on a busy machine
        "checks": {
            # A schema cannot state everything, and a 400 reports the rest: a token id beyond the vocabulary, rules
            # between fields ... A 409 depends on earlier requests.
            "positive_data_acceptance": {"expected-statuses": ["200", "400", "404", "409", "499"]},
        },
    }
)


schema = schemathesis.openapi.from_asgi("/openapi.json", APP, config=CONFIG, headers={"Authorization": f"Bearer {KEY}"})
OPERATIONS = {result.ok().label: result.ok() for result in schema.get_all_operations()}
SETTINGS = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client searches the whole environment for proxies at each request."""
    monkeypatch.setattr("requests.sessions.get_environ_proxies", lambda *_, **__: {})


def _call_and_validate(case: schemathesis.Case) -> None:
    case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"})


@pytest.mark.long
@pytest.mark.usefixtures("_without_proxies")
@pytest.mark.parametrize("label", OPERATIONS)
def test_generated_requests(label: str):
    """The test makes its requests: `schema.parametrize()` would make them all while each worker collects."""
    test = build_operation_test(
        config=schema.config,
        operation=OPERATIONS[label],
        test_func=_call_and_validate,
        explicit_settings=SETTINGS,
        given_kwargs={},
        feedback=FeedbackSources(constants_value_source=make_constants_value_source(schema)),
    )
    test()


async def test_every_route_is_on_the_page_and_nothing_else():
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        page = (await client.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"})).json()
    declared = {(method.upper(), path) for path, item in page["paths"].items() for method in item}
    routes = {
        (method, route.path.replace("{name:path}", "{model}"))
        for route in APP.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert declared == routes
    for path, item in page["paths"].items():
        for operation in item.values():
            assert {"405", "431", "500"} <= set(operation["responses"])
            assert ("401" in operation["responses"]) == (path not in ("/health", "/ping", "/ready"))


def test_each_route_has_a_handler_of_its_own():
    """The label of http_requests_total follows from the handler."""
    uses = Counter(route.endpoint for route in APP.routes if isinstance(route, Route))
    shared = {route.path for route in APP.routes if isinstance(route, Route) and uses[route.endpoint] > 1}
    assert shared <= {"/health", "/ping"}


def test_requests_are_described_by_the_models_that_check_them():
    fields = schema.raw_schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "temperature", "stop", "logit_bias"} <= set(fields)
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 1024}


@pytest.mark.parametrize("keys", [(), ("k",)])
def test_keys_are_declared_where_they_are_needed(keys: tuple[str, ...]):
    from serve_app.apis.openapi import document

    page = document(APP.routes, HttpSettings(api_key=keys))
    assert ("securitySchemes" in page["components"]) == bool(keys)
    assert page["paths"]["/v1/models"]["get"]["security"] == ([{"key": []}, {"x-api-key": []}] if keys else [])
    assert page["paths"]["/health"]["get"]["security"] == []


@pytest.mark.parametrize("hosts", [(), ("a.example",)])
def test_refused_hosts_are_declared_where_they_are_refused(hosts: tuple[str, ...]):
    from serve_app.apis.openapi import document

    page = document(APP.routes, HttpSettings(allowed_host=hosts))
    assert ("403" in page["paths"]["/v1/models"]["get"]["responses"]) == bool(hosts)
    assert "403" not in page["paths"]["/ready"]["get"]["responses"]
