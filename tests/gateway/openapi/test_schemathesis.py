"""Schemathesis calls every operation of `/openapi.json` with data that fits the document and data that does not.

Its examples are bounded and derived from the document alone: a run repeats the last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvforge.gateway.access import Access
from kvforge.gateway.app import make_app
from kvforge.gateway.config import Settings
from kvforge.gateway.openapi.operations import OPERATIONS
from kvforge.gateway.storage import Operation, Result
from kvforge.gateway.storage.inline import InlineStorage
from tests import amount
from tests.gateway.scripted import NAME, Script, application, page

EXAMPLES = amount.examples(12)
UNREADY_EXAMPLES = 4  # the answers depend on the operation more than on its data
DOCUMENTED = [content_type_conformance, response_schema_conformance, status_code_conformance]
APIS = [one for one in OPERATIONS if one.path.startswith(("/v1/", "/tokenize", "/detokenize"))]
PAGE = [one for one in OPERATIONS if one.path.startswith("/page/") and one.path != "/page/events"]  # an endless stream
# What is stored is served without a coordinator.
STORED = ("/v1/responses/{", "/v1/conversations", "/v1/sessions", "/v1/files", "/v1/batches")
UNREADY = [one for one in OPERATIONS if not one.path.startswith(("/page/", *STORED))]


def ask(app: Any, label: str, mode: GenerationMode, checks: list[Any], examples: int = EXAMPLES) -> set[int]:
    """Call one operation; return the statuses of its answers."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operation = next(found.ok() for found in schema.get_all_operations() if found.ok().label == label)
    seen = set()

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = NAME  # a request with another name is refused unread
        answer = case.call(base_url="http://localhost")
        case.validate_response(answer, checks=checks)
        seen.add(answer.status_code)

    each()
    return seen


def label_of(operation: Any) -> str:
    return f"{operation.method.upper()} {operation.path}"


class EachCall(InlineStorage):
    """A storage that may be used from any thread, since it opens its database for each call."""

    async def apply(self, *operations: Operation) -> list[Result]:
        try:
            return self.done(*operations)
        finally:
            await self.close()


def scripted(folder: Path) -> Any:
    storage = EachCall(f"sqlite:{folder}/stored.sqlite")
    script = Script(['<tool_call>{"name": "f", "arguments": {"a'], reason="length", step=1000)
    return application(script, storage=storage)


@pytest.mark.parametrize("operation", APIS, ids=label_of)
def test_an_api_serves_or_refuses_what_fits(operation: Any, tmp_path: Path) -> None:
    statuses = ask(scripted(tmp_path), label_of(operation), GenerationMode.POSITIVE, [not_a_server_error, *DOCUMENTED])
    assert statuses and max(statuses) < 500


@pytest.mark.parametrize("operation", [one for one in APIS if one.body is not None], ids=label_of)
def test_an_api_serves_or_refuses_what_does_not_fit(operation: Any, tmp_path: Path) -> None:
    statuses = ask(scripted(tmp_path), label_of(operation), GenerationMode.NEGATIVE, [not_a_server_error, *DOCUMENTED])
    assert max(statuses) < 500 and 400 in statuses


@pytest.mark.parametrize("operation", PAGE, ids=label_of)
def test_a_path_of_the_page_answers_as_it_is_documented(operation: Any) -> None:
    statuses = ask(page(), label_of(operation), GenerationMode.POSITIVE, [not_a_server_error, *DOCUMENTED])
    assert statuses and statuses <= {200, 400, 403, 429}


@pytest.mark.parametrize("operation", UNREADY, ids=label_of)
def test_every_other_path_of_an_unready_gateway_answers_as_it_is_documented(operation: Any, tmp_path: Path) -> None:
    folder = Settings(runtime_dir=str(tmp_path))
    app = make_app(folder, Access(folder))
    statuses = ask(app, label_of(operation), GenerationMode.POSITIVE, DOCUMENTED, UNREADY_EXAMPLES)
    assert statuses and statuses <= {200, 400, 503}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_is_as_documented(path: str, tmp_path: Path) -> None:
    """Examples of the tests above seldom stream."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", scripted(tmp_path))
    said: dict[str, Any] = (
        {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    said = {"input": "a", "max_output_tokens": 8} if path == "/v1/responses" else {"max_tokens": 8, **said}
    case = schema[path]["POST"].Case(body={"model": NAME, "stream": True, **said}, media_type="application/json")
    answer = case.call(base_url="http://localhost")
    assert answer.headers["content-type"][0].startswith("text/event-stream") and b"data: " in answer.content
    case.validate_response(answer, checks=[not_a_server_error, *DOCUMENTED])
