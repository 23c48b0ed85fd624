"""The command that simulates, as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.simulate.deployment import Deployment, place
from benchmark.verbs import SIMULATIONS, function
from continuous_batching.routing.routing import ROUTES
from recipes.schema.reader import load, read
from scripts.simulate import main
from scripts.trace import main as make_trace
from simulation.roofline import Roofline
from tests.thorough import first_quick

RECIPE = ["recipes/bench/llama2_7b_cuda.yaml", "model.dtype=float16", "scheduler.num_slots=32"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lengths = ["--prompt-tokens", "uniform:20:200", "--output-tokens", "uniform:2:40"]
    make_trace(["--requests", "60", "--rate", "8", *lengths, "--vocab-size", "32000", "--output", str(path)])
    return str(path)


def test_figures_pass_the_gate_and_say_what_they_are(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "line.json")
    main([*RECIPE, "--trace", trace, "--device", "ascend910b", "--tp", "2", "--json", "--timeline", output])
    result = json.loads(capsys.readouterr().out)
    assert next(iter(result)) == "SIMULATED"
    assert result["verdict"]["outcome"] == "pass", result["verdict"]["refused"]
    assert {"Little", "roofline", "recount", "at once"} <= set(result["verdict"]["passed"])
    assert (result["completed"], result["num_devices"], len(result["records"])) == (60, 2, 60)
    line = json.loads(Path(output).read_text(encoding="utf-8"))
    steps = [each for each in line["traceEvents"] if each["name"] == "step"]
    assert len(steps) == result["steps"]
    main([*RECIPE, "--trace", trace, "--device", "ascend910b", "--tp", "2"])
    assert capsys.readouterr().out.startswith("SIMULATED")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "ascend912"], r"'ascend912' is no device profile; there are ascend910, "),
        (["--profile", "none"], "--profile none: unknown profile"),
        (["cache.page_sise=3"], r"did you mean cache\.page_size"),
        (["model.path=none"], r"config\.json does not exist"),
        (["--tp", "3,5"], "none of 4 settings can run; the last: --tp: 5 tensor ranks cannot share"),
    ],
)
def test_a_search_says_what_no_setting_can_mend(
    options: list[str], words: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--trace", trace, "--dp", "1,2", "--ttft-ms", "9", "--itl-ms", "9"]
    device = [] if "--device" in options else ["--device", "h200"]
    with pytest.raises(ValueError, match=words):
        main(["search", *RECIPE, *asked, *device, *options])
    assert "allow more devices" not in capsys.readouterr().out


def test_a_mistake_is_one_line(trace: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are ascend910, ascend910b"):
        main([*RECIPE, "--trace", trace, "--device", "ascend912"])
    with pytest.raises(ValueError, match=r"^speculation.kind is ngram, and .*; add speculation.kind=none$"):
        main([*RECIPE, "speculation.kind=ngram", "--trace", trace])
    with pytest.raises(ValueError, match=r"--tp: 3 tensor ranks cannot share .* choose one of 1, 2, 4, 8"):
        main([*RECIPE, "--trace", trace, "--device", "ascend910b", "--tp", "3"])
    with pytest.raises(ValueError, match=r"and a cache of 2 pages; .*or raise --tp"):
        main([*RECIPE, "model.dtype=float32", "--trace", trace, "--device", "ascend910"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text(Path(trace).read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 61: .*; --skip-bad leaves such lines out"):
        main([*RECIPE, "--trace", str(bad), "--device", "h200"])
    main([*RECIPE, "--trace", str(bad), "--device", "h200", "--skip-bad"])


def test_a_router_needs_engines_to_choose_from(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*RECIPE, "--trace", trace, "--device", "ascend910b", "--json"]
    for few in ([], ["--split", "1:1"], ["--pp", "2"]):
        with pytest.raises(ValueError, match="--route chooses among engines; give several"):
            main([*asked, *few, "--route", "prefix"])
    results = []
    for route in ("round_robin", "least_loaded"):
        main([*asked, "--dp", "2", "--route", route])
        results.append(json.loads(capsys.readouterr().out)["ttft_ms"])
    assert results[0] != results[1]


@pytest.mark.parametrize("options", first_quick(1, [["--split", "1:1"], ["--dp", "2"], ["--pp", "2"]]))
def test_several_engines_pass_the_gate(
    options: list[str], trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [] if "--split" in options else ["--timeline", str(tmp_path / "line.json")]
    main([*RECIPE, "--trace", trace, "--device", "ascend910b", "--json", *options, *line])
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"]["outcome"] == "pass", result["verdict"]["refused"]
    assert (result["completed"], result["devices"]) == (60, 2)
    assert 0 < result["busy_share"] < 1
    if "--pp" in options:
        events = json.loads((tmp_path / "line.json").read_text(encoding="utf-8"))["traceEvents"]
        assert {each["tid"] for each in events if each["ph"] == "X"} == {0, 1}
        assert set(result["bubble_s"]) == {"PB1", "PB2", "PB3"}


def test_stages_have_the_one_scheduler_that_the_engine_has() -> None:
    recipe = read(RECIPE[0], ["model.dtype=float16", "scheduler.num_slots=33"]).recipe
    placed = place(recipe, "ascend910b", pipeline=2)
    scheduler = placed.scheduler()
    assert (scheduler.depth, scheduler.slots.num_slots) == (2, 33)
    assert scheduler.pool.num_pages == placed.memory.num_pages


def test_a_search_finds_the_fewest_devices(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    aims = ["--trace", trace, "--device", "ascend910b", "--tp", "1,2", "--dp", "1,2"]
    main(["search", *RECIPE, *aims, "--ttft-ms", "500", "--itl-ms", "10", "--percent", "60", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["meets"]
    assert all(not each["meets"] for each in found["tried"] if each["devices"] < found["best"]["devices"])
    assert len(found["tried"]) > 1
    with pytest.raises(ValueError, match=r"none of \d settings meets the objectives"):
        main(["search", *RECIPE, *aims, "--ttft-ms", "1", "--itl-ms", "1"])
    assert capsys.readouterr().out.startswith("SIMULATED")


def test_a_search_says_what_the_gate_refuses(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("".join(Path(trace).read_text(encoding="utf-8").splitlines(keepends=True)[:20]))
    asked = ["--trace", str(short), "--device", "ascend910b", "--ttft-ms", "9e4", "--itl-ms", "9e4"]
    why = "samples: 20 requests were answered; 30 are the least"
    with pytest.raises(ValueError, match=f"^--tp 1 --dp 1 does not pass the gate: refused; {why}$"):
        main(["search", *RECIPE, *asked, "--tp", "1", "--dp", "1"])
    assert why in capsys.readouterr().out


def test_devices_beyond_the_heads_hold_them_again() -> None:
    recipe = load("recipes/bench/qwen3_8b_cuda.yaml")  # of 8 heads of keys and values
    pages = {tensor: place(recipe, "h200", tensor).memory.num_pages for tensor in (4, 8, 16)}
    assert 2 * pages[4] < pages[8] < 2.3 * pages[4]  # there is less of the weights on each, too
    assert pages[8] < pages[16] < 1.1 * pages[8]
    eight, sixteen = (place(recipe, "h200", tensor).send_cached_s(10**6) for tensor in (8, 16))
    assert eight == sixteen, "a device sends a whole head"
    one = place(recipe, "h200", 1)
    assert one.memory.page_bytes == recipe.cache.page_size * one.config.kv_bytes_per_token()


def test_states_are_copied_and_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests with a common beginning go on from one state, which is copied for each."""
    path, recipe = tmp_path / "shared.jsonl", "recipes/bench/qwen3_5_116m.yaml"
    lines = [
        {"id": str(n), "prompt_token_ids": [7] * 300 + [n] * 40, "max_tokens": 9, "arrival_s": n}
        for n in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert (
        simulated(capsys, recipe, "--trace", str(path), "--device", "ascend910b", "--json")["completed"] == 6
    )
    one, two = (place(load(recipe), "ascend910b", tensor) for tensor in (1, 2))
    for placed in (one, two):
        state_s = placed.send_cached_s(0) - placed.device.send_s(0)
        sent_bytes = state_s * placed.device.link_gb_per_s * 1e9 * placed.device.link_efficiency
        assert sent_bytes == pytest.approx(placed.config.state_bytes / placed.tensor)


OWN_RANKS = [*RECIPE, "parallel.tensor=2", "parallel.pipeline=2"]


@pytest.mark.parametrize(
    ("verb", "asked", "num_devices"),
    [
        ([], [], 4),
        ([], ["--tp", "1"], 2),
        ([], ["--pp", "1"], 2),
        (["search"], ["--tp", "4", "--dp", "1", "--ttft-ms", "1e9", "--itl-ms", "1e9"], 8),
        (["routes"], ["parallel.pipeline=1", "--dp", "2"], 4),
    ],
)
def test_a_recipes_own_ranks_are_simulated(
    verb: list[str], asked: list[str], num_devices: int, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*verb, *OWN_RANKS, *asked, "--trace", trace, "--device", "ascend910b", "--json"]
    found = simulated(capsys, *asked)
    assert found.get("best", found)["devices"] == num_devices


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--dp", "2"], "^2 stages of layers are simulated for one engine alone; add parallel.pipeline=1"),
        (["--split", "1:1"], "^2 stages of layers are simulated for one engine alone; "),
        (["parallel.tensor=3"], r"^parallel\.tensor: 3 tensor ranks cannot share"),
        (["parallel.pipeline=3"], r"^parallel\.pipeline is 3; it must divide the model's 32 layers"),
        (["--costs", "none"], "^--costs are of the devices that were recorded, without stages"),
    ],
)
def test_a_recipes_own_ranks_that_cannot_be_simulated_are_refused(
    asked: list[str], words: str, trace: str
) -> None:
    with pytest.raises(ValueError, match=words):
        main([*OWN_RANKS, *asked, "--trace", trace, "--device", "ascend910b"])


def test_lengths_are_not_simulated_as_if_a_recipes_stages_were_not_there() -> None:
    with pytest.raises(ValueError, match=r"without stages of layers; add parallel\.pipeline=1$"):
        main(["lengths", *OWN_RANKS, "--device", "ascend910b"])


def test_pages_are_divided_only_between_as_many_devices_as_the_recipe_says() -> None:
    path = "recipes/bench/qwen3_8b_cuda.yaml"  # of 8 heads of keys and values
    whole, divided = (load(path, ["parallel.tensor=16", f"parallel.context={count}"]) for count in (1, 2))
    for tensor, count in ((8, 1), (16, 2)):
        one, other = (place(each, "h200", tensor) for each in (whole, divided))
        assert one.memory.page_bytes == count * other.memory.page_bytes
        assert one.send_cached_s(10**8) == pytest.approx(count * other.send_cached_s(10**8), rel=0.01)
        assert other.recipe.parallel.context == count, "costs are of this number"
    with pytest.raises(ValueError, match=r"^parallel\.context: 4 ranks cannot divide a page"):
        place(load(path, ["parallel.tensor=16", "parallel.context=4"]), "h200", 16)


def test_devices_beyond_those_that_links_join_are_told_of() -> None:
    """The network between machines is slower, and no profile has a rate of it."""
    recipe = load(RECIPE[0], RECIPE[1:])
    eight, sixteen = (str(place(recipe, "ascend910b", tensor).facts()["costs"]) for tensor in (8, 16))
    joined = f"{eight}; 16 devices are taken as joined by the links that join 8"
    assert sixteen == joined
    machine = place(recipe, "ascend910b", 8)
    assert Deployment(machine, split=(1, 1)).facts()["costs"] == joined, "prompts send pages to answers"
    assert Deployment(machine, replicas=2).facts()["costs"] == eight


def test_who_waits_between_two_engines_is_in_no_slot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "load.jsonl")
    lengths = ["--prompt-tokens", "uniform:20:200", "--output-tokens", "uniform:20:60"]
    make_trace(["--requests", "150", "--rate", "60", *lengths, "--vocab-size", "32000", "--output", path])
    capsys.readouterr()
    slots = "scheduler.num_slots=8"
    asked = [*RECIPE[:2], slots, "--trace", path, "--device", "ascend910b", "--json"]
    split = {}
    for by in ("cost", "always"):
        main([*asked, "--split", "1:1", "--split-by", by])
        result = json.loads(capsys.readouterr().out)
        verdict = result["verdict"]
        assert verdict["outcome"] == "pass", verdict["refused"]
        assert {"Little", "recount", "Little, running", "slots", "at once"} <= set(verdict["passed"])
        split[by] = result["prompts_apart"]
    assert 0 < split["cost"] < split["always"]
    with pytest.raises(ValueError, match="--split-by says which prompts are computed apart; give --split"):
        main([*asked, "--split-by", "always"])


@pytest.fixture
def few(trace: str, tmp_path: Path) -> list[str]:
    """What a simulation of two thirds of the requests is asked."""
    (tmp_path / "few.jsonl").write_text("\n".join(Path(trace).read_text().splitlines()[:40]))
    return [*RECIPE, "--trace", str(tmp_path / "few.jsonl"), "--device", "ascend910b", "--json"]


def simulated(capsys: pytest.CaptureFixture[str], *asked: str) -> dict[str, Any]:
    main([*asked])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_routes_of_a_router_are_compared(few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is what the run alone says."""
    routes = simulated(capsys, "routes", *few, "--dp", "2")["ways"]
    assert list(routes) == list(ROUTES)
    alone = simulated(capsys, *few, "--dp", "2", "--route", "prefix")
    assert routes["prefix"] == {name: alone[name] for name in routes["prefix"]}


@pytest.mark.slow
def test_splits_of_engines_are_compared(few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    told = simulated(capsys, "splits", *few, "--split", "1:1")
    splits = told["ways"]
    assert len(splits) == 9
    for row, options in ((splits["always"], ["--split-by", "always"]), (splits["cost"], [])):
        alone = simulated(capsys, *few, "--split", "1:1", *options)
        assert row == {name: alone[name] for name in row}
    assert splits["cost, answer x 0.5"]["prompts_apart"] < splits["cost, answer x 2"]["prompts_apart"]
    function(next(verb for verb in SIMULATIONS if verb.name == "splits").table)(told)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SIMULATED")
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_a_mixture_of_experts_has_a_roofline() -> None:
    recipe = load("recipes/bench/llama_125m.yaml", ["model.config.model_type=mixtral"])
    dense, mixture = (
        place(each, "h200").costs() for each in (load("recipes/bench/llama_125m.yaml", []), recipe)
    )
    assert isinstance(dense, Roofline)
    assert isinstance(mixture, Roofline)
    one, many = ((1, 1, 1, 0, 0), (512, 512, 512, 0, 0))
    assert mixture.time_s(*one) > dense.time_s(*one)
    assert mixture.time_s(*many) > dense.time_s(*many)
