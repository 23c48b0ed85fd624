"""Prompts of some engines are computed by others: when what is where, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from continuous_batching.routing.splitting import Split
from simulation.disaggregated import DisaggregatedFleet
from simulation.run_totals import RunTotals
from tests.simulation.test_serve import Fixed, requests, scheduler
from tests.thorough import first_quick


def asked(number: int, at_s: float, tokens: int = 4, timeout_s: float | None = None) -> Request:
    """A prompt of 30 tokens, of which three pages of 8 can be found."""
    prompt = np.arange(30) + 40 * number
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(str(number), prompt, params, arrival_s=at_s, timeout_s=timeout_s)


def fleet(
    totals: RunTotals, transfer_s, *, split: Split = "always", prompts=1, answers=1, slots=4, **changes
):
    return DisaggregatedFleet(
        [scheduler(**changes) for _ in range(prompts)],
        [scheduler(num_slots=slots) for _ in range(answers)],
        Fixed(),
        transfer_s,
        totals,
        num_layers=4,
        split=split,
    )


def test_a_prompt_comes_over_the_link_layer_by_layer() -> None:
    """By hand: its pages, 24 tokens, take 34 ms; the first of four layers is on its way after 8.5 ms. Six
    tokens are computed where it is answered, in 16 ms.
    """
    for link_s, there_s in ((2.4, 0.0085 + 2.4), (0.0024, 0.034 + 0.0006)):
        totals = RunTotals(records=[])
        split = fleet(totals, lambda tokens, link_s=link_s: link_s * tokens / 24)
        split.serve([asked(0, 1.0), Request("b", asked(0, 0).prompt, SamplingParams(1), arrival_s=50.0)])
        assert totals.records is not None
        first, second = totals.records
        assert first["first_token_s"] == pytest.approx(there_s + 0.016, abs=1e-6)
        assert first["finish_s"] == pytest.approx(there_s + 0.016 + 3 * 0.011, abs=1e-6)
        assert second["first_token_s"] - second["arrival_s"] == pytest.approx(0.016), (
            "found where it is answered"
        )
        assert (split.num_split, totals.requests, totals.completed) == (1, 2, 2)
        assert totals.busy_s == pytest.approx(0.034 + 0.016 + 3 * 0.011 + 0.016)


def test_a_link_sends_one_prompt_after_the_other() -> None:
    totals = RunTotals(records=[])
    fleet(totals, lambda _: 1.0).serve([asked(0, 0.0), asked(1, 0.0)])
    assert totals.records is not None
    first_s = [each["first_token_s"] for each in totals.records]
    # Both are computed in two steps: 24 tokens and 8 of the second, then the rest of it
    assert first_s == pytest.approx([0.0105 + 1.0 + 0.016, 0.0105 + 2.0 + 0.016], abs=1e-6)


@pytest.mark.parametrize("split", first_quick(1, ["cost", "always"]))
def test_no_split_request_is_lost(split: Split) -> None:
    """Nor any time that it is there, and nothing of it is left in the router."""
    totals = RunTotals(records=[])
    two = fleet(totals, lambda tokens: 1e-4 * tokens, split=split, prompts=2, slots=32)
    two.serve(requests(80, 15.0))
    figures = totals.figures()
    assert figures["completed"] == 80
    num_long = sum(each.num_prompt_tokens > 8 for each in requests(80, 15.0))
    assert two.num_split == num_long if split == "always" else 0 < two.num_split < num_long
    assert totals.records is not None
    lens = {each["id"]: each["output_tokens"] for each in totals.records}
    assert lens == {each.id: each.params.max_tokens for each in requests(80, 15.0)}
    waits_s = sum(each["finish_s"] - each["arrival_s"] for each in totals.records)
    assert figures["mean_in_system"] == pytest.approx(waits_s / figures["duration_s"], rel=1e-4)
    assert two.routing.requests.tolist() == [0, 0, 0]


def test_prompts_engines_answer_what_no_other_has_a_slot_for() -> None:
    """And what they answered is counted: all tokens, all gaps, all time."""
    totals = RunTotals(records=[])
    three = fleet(totals, lambda tokens: 1e-4 * tokens, split="cost", prompts=2, num_slots=8)
    trace = [asked(number, 0.0, tokens=9) for number in range(12)]  # 4 slots where they are answered
    three.serve(trace)
    assert three.routed.requests is not None
    assert sum(three.routed.requests[:2]) >= 4
    figures = totals.figures()
    assert (figures["completed"], figures["output_tokens"], totals.requests) == (12, 12 * 9, 12)
    assert totals.itl.count == 12 * 8
    assert totals.records is not None
    waits_s = sum(each["finish_s"] - each["arrival_s"] for each in totals.records)
    assert totals.running_s + totals.waiting_s == pytest.approx(waits_s)
    assert three.routing.requests.tolist() == [0, 0, 0]


def test_time_runs_out_on_both_sides_and_on_the_way() -> None:
    def ended(timeout_s: float | None, busy: int = 0) -> tuple[int, int, int]:
        trace = [asked(n, 0.0, timeout_s=timeout_s if n == busy else None) for n in range(busy + 1)]
        totals = RunTotals()
        fleet(totals, lambda _: 0.1, num_slots=1).serve(trace)
        return totals.completed, totals.cut_short, totals.requests

    # all has come after 8.5 + 100 ms, the first token 16 ms later, then three steps of 11 ms
    assert ended(None) == ended(0.158) == (1, 0, 1)
    assert ended(0.14) == (0, 1, 1)
    assert ended(0.1) == (0, 0, 1), "on the way"
    assert ended(0.05, busy=3) == (3, 0, 4), "it waits for the prompts' only slot"


def test_a_prompt_alone_is_computed_where_it_is_answered() -> None:
    """By the router's own rule: nothing runs there that it could delay."""
    totals = RunTotals()
    one = fleet(totals, lambda _: 0.0, split="cost")
    one.serve([asked(number, 10.0 * number) for number in range(3)])
    assert (one.num_split, totals.completed) == (0, 3)
    assert totals.ttft.total_s == pytest.approx(3 * 0.040)


def test_what_no_engine_can_serve_is_refused_where_it_would_be_answered() -> None:
    totals = RunTotals()
    huge = Request("huge", np.arange(900), SamplingParams(max_tokens=4), arrival_s=0.0)
    split = fleet(totals, lambda _: 0.1)
    split.serve([huge, asked(0, 1.0)])
    assert huge.finish_reason == "error"
    assert (split.num_split, totals.requests, totals.completed) == (1, 2, 1)
