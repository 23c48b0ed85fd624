"""Hold what a server sends to what its /openapi.json says."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from jsonschema import Draft202012Validator

Description = dict[str, Any]
_ERROR = {"$ref": "#/components/schemas/ErrorAnswer"}


def check(description: Description, method: str, path: str, response: httpx.Response) -> None:
    """Raise AssertionError or jsonschema's ValidationError for an answer that is not described."""
    operation = _operation(description, method, path)
    responses = operation["responses"]
    described = responses.get(str(response.status_code), responses["default"])
    assert response.status_code < 300 or described is not responses["200"]
    kind = response.headers["content-type"].partition(";")[0]
    schema = described["content"][kind]["schema"]
    if kind == "application/json":
        _hold(description, schema, response.json())
    elif kind == "text/event-stream":
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        assert events
        for event in events:
            _hold(description, _ERROR if event.keys() == {"error"} else schema["contentSchema"], event)


def _operation(description: Description, method: str, path: str) -> Any:
    for template, operations in description["paths"].items():
        pattern = re.sub(r"\{name\}", ".+", template)
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path) and method.lower() in operations:
            return operations[method.lower()]
    raise AssertionError(f"{method} {path} is not described")


def _hold(description: Description, schema: Any, value: Any) -> None:
    Draft202012Validator({**schema, "components": description["components"]}).validate(value)
