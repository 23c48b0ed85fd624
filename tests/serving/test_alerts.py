"""Each alert fires when what it names happens, and not just short of it: asked of Prometheus's own promtool.

Series are read every 15 s, as serving/deploy/prometheus.yaml says, and written as promtool writes them:
`0+30x40` begins at 0 and grows by 30 in each of 40 readings.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S

RULES = ROOT / "serving/deploy/alerts.yaml"
SCRAPED = 'instance="a:8000",job="continuous-batching"'
OURS = f'engine="0",model_name="tiny",{SCRAPED}'
READINGS = 60  # a quarter of an hour
Series = dict[str, str]


def of(name: str, values: str, **labels: str) -> Series:
    """One series of the server, by its name and its own labels."""
    own = "".join(f',{label}="{value}"' for label, value in labels.items())
    scraped = SCRAPED if name == "up" or name.startswith("process_") else OURS
    return {f"{name}{{{scraped}{own}}}": values}


def steady(per_reading: float) -> str:
    return f"0+{per_reading}x{READINGS}"


def waits(name: str, bound: str, quick: float, slow: float) -> Series:
    """A histogram of which so many values a reading are at or below the bound, and so many far above it."""
    return {
        **of(f"{name}_bucket", steady(0), le="0.01"),
        **of(f"{name}_bucket", steady(quick), le=bound),
        **of(f"{name}_bucket", steady(quick + slow), le="80.0"),
        **of(f"{name}_bucket", steady(quick + slow), le="+Inf"),
    }


def rejected(per_reading: float) -> Series:
    taken = of("cb_requests_total", steady(90))
    return (
        taken
        | of("cb_rejects_total", steady(per_reading), reason="queue_full")
        | of("cb_rejects_total", steady(0), reason="refused")
    )


def responses(code: str, per_reading: float) -> Series:
    return of("cb_http_responses_total", steady(1000), code="200") | of(
        "cb_http_responses_total", steady(per_reading), code=code
    )


def pages(used: float, preemptions: float) -> Series:
    return of("vllm:kv_cache_usage_perc", f"{used}x{READINGS}") | of(
        "cb_preemption_total", steady(preemptions)
    )


def silent(age_s: float) -> Series:
    return (
        of("cb_engine_up", f"1x{READINGS}")
        | of("cb_engine_step_age_seconds", f"{age_s}x{READINGS}")
        | of("cb_engine_step_age_limit_seconds", f"20x{READINGS}")
    )


def lost_work(tokens: float) -> Series:
    return (
        of("cb_preempted_tokens_total", steady(tokens))
        | of("cb_prefill_tokens_total", steady(400))
        | of("cb_decode_tokens_total", steady(600))
    )


def timeouts(per_reading: float) -> Series:
    return of("cb_aborts_total", steady(per_reading), reason="timeout") | of(
        "cb_sample_ends_total", steady(100), reason="stop"
    )


# For each alert: a server that it is about, and one that is just within its limits
CASES: dict[str, tuple[Series, Series]] = {
    "ServerDown": (of("up", "1x3 0x57"), of("up", "1 1 0 0 0 1x55")),
    "EngineDown": (of("cb_engine_up", "1x3 0x57"), of("cb_engine_up", "1x3 0x6 1x50")),
    "EngineSilent": (
        silent(11),
        silent(10),
    ),
    "EngineRestarts": (
        of("cb_engine_restarts_total", "0x19 1x9 2x9 3x20"),
        of("cb_engine_restarts_total", "0x30 1x29"),
    ),
    "PageLeak": (of("cb_kv_page_leak_total", "0x40 1x20"), of("cb_kv_page_leak_total", "3x60")),
    "RequestsRejected": (rejected(6), rejected(4)),
    "QueueSlow": (waits("cb_queue_seconds", "10.0", 94, 6), waits("cb_queue_seconds", "10.0", 96, 4)),
    "FirstTokenSlow": (
        waits("cb_time_to_first_token_seconds", "5.0", 94, 6),
        waits("cb_time_to_first_token_seconds", "5.0", 96, 4),
    ),
    "TokensSlow": (
        waits("cb_inter_token_latency_seconds", "0.5", 98, 2),
        waits("cb_inter_token_latency_seconds", "0.5", 99.5, 0.5),
    ),
    "RequestsFail": (
        of("cb_sample_ends_total", "0x40 1x20", reason="error"),
        of("cb_sample_ends_total", "1x60", reason="error")
        | of("cb_sample_ends_total", steady(9), reason="stop"),
    ),
    "ServerErrors": (responses("503", 11), responses("503", 9)),
    "PagesShort": (pages(0.96, 1), pages(0.96, 0)),
    "WorkLost": (lost_work(110), lost_work(90)),
    "TimeoutsMany": (timeouts(6), timeouts(4)),
    "SlowReaders": (
        of("cb_aborts_total", "0x20 12x40", reason="slow_reader"),
        of("cb_aborts_total", "0x20 9x40", reason="slow_reader"),
    ),
    "KeysWrong": (responses("401", 16), responses("401", 14)),
    "MemoryGrows": (
        of("process_resident_memory_bytes", "1000000000+4800000x195"),
        of("process_resident_memory_bytes", "1000000000+4000000x195"),
    ),
    "DescriptorsShort": (
        of("process_open_fds", f"81x{READINGS}") | of("process_max_fds", f"100x{READINGS}"),
        of("process_open_fds", f"80x{READINGS}") | of("process_max_fds", f"100x{READINGS}"),
    ),
    "LogLost": (of("cb_log_lines_lost_total", "0x40 1x20"), of("cb_log_lines_lost_total", "5x60")),
}


def asked(alert: str, series: Series, *, fires: bool) -> dict[str, Any]:
    """As promtool reads it: at the end of the quarter of an hour, or of three hours for `for: 2h`."""
    is_long = alert == "MemoryGrows"
    answer = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "name": f"{alert} {'fires' if fires else 'does not fire'}",
        "interval": "1m" if is_long else "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": "195m" if is_long else "15m",
                "exp_samples": answer,
            }
        ],
    }


def promtool(
    folder: Path, tests: list[dict[str, Any]], rules: Path = RULES
) -> subprocess.CompletedProcess[str]:
    """What promtool says of such tests."""
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here")
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    return subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_every_alert_has_a_case() -> None:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(CASES)


def test_each_alert_fires_on_what_it_is_about_alone(tmp_path: Path) -> None:
    tests = [
        asked(alert, series, fires=fires)
        for alert, both in CASES.items()
        for fires, series in zip((True, False), both, strict=True)
    ]
    ran = promtool(tmp_path, tests)
    assert ran.returncode == 0, ran.stdout + ran.stderr
