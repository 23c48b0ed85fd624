"""The router tells the replica that answers which other one computes the prompt.

The replicas are scripted servers.
"""

from __future__ import annotations

import pytest

from serving.router.models import Listed
from tests.serving.router.test_proxy import WHOLE, Fleet, hang, run, stream

HEADER = b"x-prompt-replica: "


def apart(fleet: Fleet) -> None:
    """The last replica computes prompts for the others."""
    last = len(fleet.stubs) - 1
    for number in range(last):
        fleet.splitting.is_known(number, "", ["tcp://prompts:1"], 0)
    fleet.splitting.is_known(last, "tcp://prompts:1", [], 0)


def test_a_replica_that_answers_is_told_who_computes_the_prompt() -> None:
    async def test() -> None:
        async with Fleet(stream(*WHOLE), stream(*WHOLE)) as fleet:
            apart(fleet)
            status, body = await fleet.ask()
            assert (status, body) == (200, b"".join(WHOLE))
            answers, prompts = fleet.stubs
            assert [HEADER + b"tcp://prompts:1" in head for head in answers.heads] == [True]
            assert not prompts.heads, "nothing is asked of it but by the replica that answers"
            assert fleet.figures.num_split == fleet.replicas[1].num_prompts == 1
            assert "cb_route_split_total 1" in fleet.figures.as_metrics()

    run(test)


def test_prompts_for_an_adapter_are_computed_by_who_lists_it() -> None:
    async def test() -> None:
        async with Fleet(stream(*WHOLE), stream(*WHOLE)) as fleet:
            apart(fleet)
            tiny = {"tiny": b"{}"}
            fleet.proxy._models.learn(0, Listed(tiny | {"fox": b"{}"}, ("tiny",), ("fox",)))
            for listed in (tiny, tiny | {"fox": b"{}"}):
                adapters = tuple(each for each in listed if each != "tiny")
                fleet.proxy._models.learn(1, Listed(listed, ("tiny",), adapters))
                prompt = str(len(listed)) * 600  # nobody has seen it
                await fleet.ask(model="fox", messages=[{"role": "user", "content": prompt}])
            told = [HEADER in head for head in fleet.stubs[0].heads]
            assert told == [False, True]

    run(test)


def test_while_no_answer_has_begun_the_prompt_counts_where_it_is_computed() -> None:
    async def test() -> None:
        async with Fleet(hang, hang) as fleet:
            apart(fleet)
            counted = []
            ask = fleet.replicas[0].server.ask

            async def asking(*arguments, **named):
                counted.append((fleet.routing.queued_tokens.tolist(), fleet.routing.requests.tolist()))
                return await ask(*arguments, **named)

            fleet.replicas[0].server.ask = asking
            await fleet.ask(leaves_after=0)
            ((queued, requests),) = counted
            assert queued[0] == 0
            assert queued[1] > 100
            assert requests == [1, 1]

    run(test)


def test_where_no_replica_of_answers_is_open_one_of_prompts_answers() -> None:
    async def test() -> None:
        async with Fleet(None, stream(*WHOLE)) as fleet:
            apart(fleet)
            status, body = await fleet.ask()
            assert (status, body) == (200, b"".join(WHOLE))
            assert HEADER not in fleet.stubs[1].heads[0]

    run(test)


@pytest.mark.parametrize("begun", [False, True])
def test_a_lost_replica_of_answers_is_told_as_any_other(begun: bool) -> None:
    async def test() -> None:
        async with Fleet(stream(*WHOLE[:1], ends=False) if begun else None, None, stream(*WHOLE)) as fleet:
            apart(fleet)
            status, body = await fleet.ask()
            assert status == 200
            assert (b"replica_lost" in body) == begun
            assert (b"[DONE]" in body) != begun

    run(test)
