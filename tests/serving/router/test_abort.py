"""The router asks the replica that has a request to end it, and tells the client where none has it."""

from __future__ import annotations

import json

import pytest

from tests.serving.router.test_proxy import Fleet, run, whole

ENDED, UNKNOWN, REFUSED = whole(200, b'{"aborted":1}'), whole(404, b"{}"), whole(401, b'{"key":0}')


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_replica_that_has_it_ends_it(place: int) -> None:
    async def test() -> None:
        scripts = [UNKNOWN, UNKNOWN, UNKNOWN]
        scripts[place] = ENDED
        async with Fleet(*scripts) as fleet:
            status, body = await fleet.ask("/abort/cmpl-1")
            assert (status, json.loads(body)) == (200, {"aborted": 1})
            assert fleet.stubs[place].heads[0].startswith(b"POST /abort/cmpl-1 HTTP/1.1")
            assert not any(each.num_sent for each in fleet.replicas), "it counts as no request"

    run(test)


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        ((UNKNOWN, UNKNOWN), 404),
        ((UNKNOWN, None), 404),
        ((UNKNOWN, REFUSED), 401),
        ((REFUSED, UNKNOWN), 401),
        ((None, ENDED), 200),
        ((None, None), 503),
    ],
)
def test_where_none_has_it_the_client_is_told_why(scripts, status: int) -> None:
    async def test() -> None:
        async with Fleet(*scripts) as fleet:
            assert (await fleet.ask("/abort/cmpl-1"))[0] == status

    run(test)
