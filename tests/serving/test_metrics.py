"""A running server reports metrics, dashboard, alerts and log as operators and `scripts.top` read them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from borders.version import VERSION
from recipes.schema.recipe import ROOT
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server
from tests.serving.warm import completed

pytestmark = pytest.mark.in_order

KEY, CANARY = "key-canary-7f3a", "prompt-canary-91bd"
HEADERS = {"authorization": f"Bearer {KEY}"}
DEPLOY = ROOT / "serving/deploy"
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
SHOWN = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]

# The names that the issue asks for, from the servers that ours follows; and vLLM's
SOURCES = """requests_total requests_queued requests_running request_latency_seconds batch_size batch_tokens
batch_utilization iteration_latency_ms scheduler_overhead_us preemption_total swap_in_total swap_out_total
tokens_generated_total prefill_tokens_total decode_tokens_total"""
VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total
request_success_total iteration_tokens_total request_prompt_tokens request_generation_tokens
request_max_num_generation_tokens
request_params_n request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds
time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds cache_config_info
corrupted_requests_total"""
BUCKETS = {
    "cb_request_latency_seconds": [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30],
    "cb_batch_size": [1, 2, 4, 8, 16, 32, 64, 128, 256],
    "cb_batch_tokens": [100, 500, 1000, 2000, 4000, 8000, 16000],
    "cb_iteration_latency_ms": [1, 2, 5, 10, 20, 50, 100, 200],
    "cb_scheduler_overhead_us": [10, 50, 100, 500, 1000, 5000],
}
OF_TARGET = {"instance", "job"}  # labels that Prometheus itself puts on what it scrapes
OF_GRAFANA = {"$__rate_interval": "5m", "$model": ".*", "$source": "x"}
Labels = dict[str, set[str]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that has answered, refused and ended some."""
    server = Server(
        TINY,
        "server.max_requests=8",
        "--log-format",
        "json",
        "--log-requests",
        environment={"API_KEY": KEY},
    ).ready()
    post(server, {"prompt": f"{CANARY} 348+275=", "max_tokens": 8, "n": 2})
    post(server, {"prompt": CANARY, "max_tokens": 4, "stream": True})
    post(server, {"prompt": CANARY, "max_tokens": -2}, 400)
    url, long = f"{server.url}/v1/completions", {"max_tokens": 300, "ignore_eos": True, "stream": True}
    eight = {"prompt": CANARY, "n": 8, **long}
    with httpx.stream("POST", url, json=eight, headers=HEADERS, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        post(server, {"prompt": CANARY}, 429)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    post(server, {"prompt": CANARY, "timeout_s": 0.001, "max_tokens": 1500, "ignore_eos": True})
    assert (
        httpx.post(
            f"{server.url}/v1/completions?key={KEY}", json={"prompt": CANARY}, timeout=PATIENCE_S
        ).status_code
        == 401
    )
    yield server
    assert server.close() == 0


def post(server: Server, body: dict[str, object], status: int = 200) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=PATIENCE_S)
    assert answer.status_code == status, answer.text


def scrape(server: Server) -> dict[str, dict[str, float]]:
    """Values by name, and by the labels that are not on all."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text_of(server)):
        assert family.documentation
        for each in family.samples:
            own = [value for key, value in each.labels.items() if key not in ("model_name", "engine")]
            values[each.name][",".join(own)] = each.value
    return values


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """Each metric of an expression, and its matchers: label, value, and whether it must be equal.

    The parser is not this project's. Raises ValueError.
    """
    found: list[tuple[str, list[tuple[str, str, bool]]]] = []

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None, "a selector of ours names its metric"
            matchers = node.matchers.matchers
            found.append(
                (
                    node.name,
                    [(each.name, each.value, each.op == promql_parser.MatchOp.Equal) for each in matchers],
                )
            )

    promql_parser.walk(promql_parser.parse(in_prometheus(expression)), visit)
    yield from found


def in_prometheus(expression: str) -> str:
    """The expression as Grafana sends it to Prometheus."""
    for name, value in OF_GRAFANA.items():
        expression = expression.replace(name, value)
    return expression


def grouping(expression: str) -> set[str]:
    """The labels that an expression sums by, or joins on."""
    clauses = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression)
    return {label.strip() for clause in clauses for label in clause.split(",")}


def text_of(server: Server) -> str:
    response = httpx.get(f"{server.url}/metrics", headers=HEADERS, timeout=PATIENCE_S)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.text


@pytest.fixture(scope="module")
def labels(server: Server) -> dict[str, Labels]:
    """The labels of each sample's name, and their values."""
    found: dict[str, Labels] = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(text_of(server)):
        for each in family.samples:
            found[each.name]
            for label, value in each.labels.items():
                found[each.name][label].add(value)
    return found


def test_every_name_is_there_with_its_labels_and_buckets(labels: dict[str, Labels]) -> None:
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in labels}
    assert not {f"cb_{name}" for name in SOURCES.split()} - bases
    assert len(VLLM.split()) >= 24
    assert not {f"vllm:{name}" for name in VLLM.split()} - bases
    for name, own in labels.items():
        if not name.startswith(("process_", "cb_engine_process_")):
            assert own["model_name"] == {"tiny"}
            assert own["engine"] == {"0"}
    assert labels["cb_build_info"]["version"] == {VERSION}
    for name, bounds in BUCKETS.items():
        told = sorted(float(bound) for bound in labels[f"{name}_bucket"]["le"])
        assert told == [*bounds, float("inf")]


def test_what_was_counted_agrees_with_what_was_asked(server: Server) -> None:
    found = scrape(server)
    ends = found["cb_sample_ends_total"]
    assert found["cb_samples_total"][""] == sum(ends.values()) == 12
    assert ends["timeout"] == found["cb_aborts_total"]["timeout"] == 1
    assert found["cb_rejects_total"]["queue_full"] == found["cb_http_responses_total"]["429"] == 1
    assert found["cb_rejects_total"]["refused"] == 1
    assert found["cb_http_responses_total"]["401"] >= 1
    assert found["cb_http_responses_total"]["503"] == 0  # /ready answers it, which is a probe
    assert found["cb_samples_open"][""] == found["cb_kv_page_leak_total"][""] == 0
    assert found["cb_tokens_generated_total"] == found["vllm:generation_tokens_total"]
    for name in ("cb_time_to_first_token_seconds", "cb_queue_seconds", "cb_prefill_seconds"):
        assert found[f"{name}_count"][""] >= 3
        assert found[f"{name}_bucket"]["+Inf"] == found[f"{name}_count"][""]


def check_expression(expression: str, labels: dict[str, Labels]) -> None:
    """All names, labels and values that it asks for are there."""
    known: set[str] = set()
    for name, matchers in selectors(expression):
        if name == "up":  # Prometheus's own
            known |= OF_TARGET
            continue
        assert name in labels, name
        known |= set(labels[name]) | OF_TARGET
        for label, value, is_equal in matchers:
            assert label in set(labels[name]) | OF_TARGET, f"{name} has no label {label}"
            if is_equal and label in labels[name]:
                assert value in labels[name][label], f"{name} is never {label}={value}"
    assert not grouping(expression) - known


@each_of("expression", [*(rule["expr"] for rule in RULES), *dict.fromkeys(SHOWN)])
def test_every_expression_asks_for_what_is_there(expression: str, labels: dict[str, Labels]) -> None:
    check_expression(expression, labels)


def test_a_burst_of_errors_is_an_increase(labels: dict[str, Labels]) -> None:
    # Prometheus sees none where a series begins with the burst: each status must be there before it happens
    assert {"401", "429", "500", "503"} <= labels["cb_http_responses_total"]["code"]


def test_alerts_are_written_as_prometheus_reads_them() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 10
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Za-z]\w*", rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        promql_parser.parse_duration(rule.get("for", "1m"))
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = grouping(rule["expr"]) or {"model_name", "engine", *OF_TARGET}
        assert used <= kept, rule["alert"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))
    assert all((DEPLOY / name).is_file() for name in prometheus["rule_files"])
    jobs = {each["job_name"] for each in prometheus["scrape_configs"]}
    assert {job for rule in RULES for job in re.findall(r'job="([^"]+)"', rule["expr"])} == jobs


def test_the_dashboard_lays_out_every_panel_once(labels: dict[str, Labels]) -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for variable in DASHBOARD["templating"]["list"]:
        for name, label in re.findall(r"label_values\((\S+), (\w+)\)", str(variable["query"])):
            assert label in labels[name]
    for target in (each for panel in DASHBOARD["panels"] for each in panel.get("targets", [])):
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= grouping(target["expr"]), target
        assert "$" not in in_prometheus(target["expr"])


def test_the_log_is_an_object_a_line_and_holds_no_text_and_no_key(server: Server) -> None:
    server.wait_for('"status": 401')
    entries = [json.loads(line) for line in server.log]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(each) for each in entries))
    assert any(each["message"].startswith("engine: attention of") for each in entries)
    told = [each for each in entries if each.get("path") == "/v1/completions"]
    assert [each["status"] for each in told] == [200, 200, 400, 429, 200, 200, 401]
    assert len({each["request_id"] for each in told}) == 7
    log = "\n".join(server.log)
    assert KEY not in log
    assert "canary" not in log


def test_top_draws_one_frame_for_a_pipe(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("scripts.top", server.url, "--once", "--every", "0.3")
    monkeypatch.setenv("API_KEY", KEY)
    shown = completed(*command).stdout
    assert "tiny: engine up, 0 restarts" in shown
    assert "0 of 32" in shown
    counts = re.search(r"(\d+) used, (\d+) shared, (\d+) cached, (\d+) free", shown)
    assert counts is not None
    assert sum(map(int, counts.groups())) == 1023
    monkeypatch.delenv("API_KEY")
    ended = completed(*command)
    assert ended.returncode == 2
    assert "API_KEY" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
