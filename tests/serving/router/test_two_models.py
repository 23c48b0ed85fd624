"""Two models of real servers behind one router, asked by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.router.under_fire import fleet, wait_ready
from tests.serving.server import Server


@pytest.fixture(scope="module")
def front(shared: Server, agent: Server) -> Iterator[Server]:
    replicas = [option for each in (shared, agent) for option in ("--replica", each.url)]
    found = Server(*replicas, verb="scripts.route")
    wait_ready(found.url, 2)
    yield found
    assert found.close() == 0


def test_each_model_is_answered_by_its_own_replica(front: Server, shared: Server, agent: Server) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == ["tiny", "agent"]
        assert client.models.retrieve("agent").id == "agent"
        sent = [each["sent"] for each in fleet(front.url)["replicas"]]
        for model in ("tiny", "agent", "agent", "tiny"):
            whole = client.completions.create(model=model, prompt="One day", max_tokens=4, temperature=0)
            assert whole.model == model
            pieces = [
                each.choices[0].text
                for each in client.completions.create(
                    model=model, prompt="One day", max_tokens=4, temperature=0, stream=True
                )
            ]
            assert "".join(pieces) == whole.choices[0].text
            assert client.responses.create(model=model, input="Hello", max_output_tokens=2).model == model
        found = fleet(front.url)["replicas"]
        assert [each["models"] for each in found] == [["tiny"], ["agent"]]
        assert [each["sent"] - before for each, before in zip(found, sent)] == [6, 6]
        with pytest.raises(openai.NotFoundError, match="'tiny', 'agent'"):
            client.completions.create(model="other", prompt="One day")
        response = httpx.post(f"{front.url}/v1/completions", json={"prompt": "One day"}, timeout=PATIENCE_S)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
