"""Serve the same loads with this engine and with vLLM's build for a CPU, in turns, each in a fresh process.

Both get the model of the recipe with random weights, a tokenizer, the recipe's slots and its budget of
tokens in a step, room for all requests of a load, the same threads and the same preloaded libraries.
Prefixes are shared only in the row that is about them, so that no counted run finds what its warm-up
computed. A turn's process serves the load once as a warm-up and is then counted once. The median of the
turns counts, and a ratio is printed only where every answer had its full length, the client kept its
times, and the machine was quiet before each turn. It is not watched during a turn: the processor time of
vLLM's workers, which end as orphans, is not to be told from that of others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmark.options import in_turns, markdown, recipe_of
from benchmark.processes import ServerProcess, kill_session, leaving_at_signals, serving
from benchmark.run_record import OtherLoad
from benchmark.serve.client import digest, read_requests
from benchmark.serve.measure import ServePlan, measure
from benchmark.workloads.synthetic import Line, SyntheticLoad, draw_requests, lengths, shared_prompts
from recipes.assembly.families import model_config
from recipes.schema.recipe import ROOT, Recipe

ENVIRONMENT = ".venv/vllm"  # scripts/setup.sh puts vLLM there
SEED = 47856  # all loads have it, as those in docs/measured
SHARE = 0.7  # the part of the slower engine's burst that arrives in the steady row
QUIET = 0.05  # most of the machine's processor time that others may take before a turn
SETTLE_S = 1.0  # seconds before a turn, for the last one's processes to be gone
WATCH_S = 2.0  # seconds in which others are watched then
ROOM_TOKENS = 128  # each request is rounded up to it in both caches; the pages of vLLM on a CPU
START_S, END_S = 1800.0, 120.0  # seconds for vLLM's server, which compiles the model when it starts first
SHORT = ("uniform:70:210", "uniform:32:96")
SERVED = {  # figures of a row that is served, by the client's names
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
}
OWN_ENTRY = ("-m", "vllm.entrypoints.openai.api_server")


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One load: lengths as `scripts.trace` draws them, and whether it is served over HTTP, and when."""

    name: str
    title: str
    prompt_tokens: str
    output_tokens: str
    served: bool = True
    steady: bool = False  # arrivals of a Poisson process; else all come at once
    system_prompts: str | None = None
    one_in: int = 1  # it has so many times fewer requests

    def lines(self, vocab_size: int, num_requests: int) -> list[Line]:
        """Return its requests, which all come at once."""
        load = SyntheticLoad(lengths(self.prompt_tokens), lengths(self.output_tokens), vocab_size, SEED)
        if self.system_prompts is not None:
            load = replace(load, system_prompts=shared_prompts(self.system_prompts))
        return draw_requests(load, max(1, num_requests // self.one_in))


ROWS = (
    BesideRow("at-once", "in process, all at once", *SHORT, served=False),
    BesideRow("burst", "served, all at once", *SHORT),
    BesideRow("steady", "served, Poisson arrivals", *SHORT, steady=True),
    BesideRow("shared", "served, 4 prefixes of 512", "uniform:20:60", SHORT[1], system_prompts="4:512"),
    BesideRow("long", "in process, contexts of 4,096", "4096", "128", served=False, one_in=8),
)


@dataclass(frozen=True, slots=True)
class Load:
    """A row's requests, the file that has them, and the tokens for which both caches have room."""

    row: BesideRow
    path: Path
    lines: Sequence[Line]

    @property
    def output_tokens(self) -> int:
        return sum(int(each["max_tokens"]) for each in self.lines)

    @property
    def longest(self) -> int:
        return max(self._needs)

    @property
    def cache_tokens(self) -> int:
        return sum(-(-each // ROOM_TOKENS) + 1 for each in self._needs) * ROOM_TOKENS

    @property
    def _needs(self) -> list[int]:
        return [len(each["prompt_token_ids"]) + int(each["max_tokens"]) for each in self.lines]


class BesideSide(Protocol):
    """One of both engines."""

    def at_once(self, load: Load) -> tuple[float, int]:
        """Serve a load in a process of its own; returns its seconds, and the tokens of all answers."""

    def server(self, load: Load) -> AbstractContextManager[ServerProcess]:
        """Return a server with room for a load, which ends with the context."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What both engines are given: the recipe, a folder of its model, threads, and variables."""

    recipe: Recipe
    folder: Path
    threads: int
    environment: Mapping[str, str]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def log(self, name: str) -> Path:
        """Return where what an engine says goes."""
        return self.folder / f"{name}.log"

    def run(self, name: str, command: Sequence[str], more: Mapping[str, str]) -> str:
        """Run a command and return its output; raises ValueError, with its last words, if it fails.

        Whatever ends the wait for it also ends it, and the processes that it started in its session.
        """
        environment = {**os.environ, **self.environment, **more}
        with (
            leaving_at_signals(),
            self.log(name).open("wb") as log,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            ) as process,
        ):
            try:
                told, _ = process.communicate()
            finally:
                kill_session(process)
        if process.returncode:
            said = self.log(name).read_text(errors="replace") + told.decode(errors="replace")
            last = "; ".join(line.strip() for line in said.splitlines()[-3:])
            raise ValueError(f"{name} ended with status {process.returncode}; it last said: {last}")
        return told.decode()


@dataclass(frozen=True, slots=True)
class OwnSide:
    """This engine, by the verbs that a user would call."""

    setting: Setting
    recipe: str
    overrides: Sequence[str]

    def _given(self, load: Load) -> list[str]:
        setting, page = self.setting, self.setting.recipe.cache.page_size
        return [
            str(Path(self.recipe).resolve()),
            *self.overrides,
            *(f"model.{name}" for name in (f"path={setting.model}", "config=null", "weights=random")),
            f"device.threads={setting.threads}",
            f"cache.num_pages={load.cache_tokens // page + 1}",
            f"cache.prefix_sharing={str(load.row.system_prompts is not None).lower()}",
        ]

    def at_once(self, load: Load) -> tuple[float, int]:
        verb = [sys.executable, "-m", "scripts.benchmark", "offline"]
        told = self.setting.run(
            "ours", [*verb, *self._given(load), "--trace", str(load.path), "--runs", "1", "--json"], {}
        )
        found = json.loads(told)
        return float(found["duration_s"]), int(found["output_tokens"])

    def server(self, load: Load) -> AbstractContextManager[ServerProcess]:
        command = [sys.executable, "-m", "scripts.serve", *self._given(load), "--host", "127.0.0.1"]
        environment = self.setting.environment
        return serving("ours", [*command, "--port", "0"], self.setting.log("ours"), environment=environment)


@dataclass(frozen=True, slots=True)
class VllmSide:
    """vLLM, by its class `LLM` and by its own server."""

    setting: Setting
    python: str

    def engine(self, load: Load) -> dict[str, Any]:
        """Return the keywords of vllm.LLM, which are also the flags of its server."""
        recipe, config = self.setting.recipe, model_config(self.setting.recipe)
        return {
            "model": str(self.setting.model),
            "load_format": "dummy",
            "dtype": config.dtype,
            "max_model_len": load.longest,
            "max_num_seqs": recipe.scheduler.num_slots,
            "max_num_batched_tokens": recipe.scheduler.max_batch_tokens,
            "kv_cache_memory_bytes": load.cache_tokens * config.growing_kv_bytes_per_token,
            "enable_prefix_caching": load.row.system_prompts is not None,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Return its variables; left alone, its server keeps a core of the machine for itself."""
        cores = sorted(os.sched_getaffinity(0))[: self.setting.threads]
        bound = ",".join(map(str, cores))
        return {"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

    def at_once(self, load: Load) -> tuple[float, int]:
        asked, found = (self.setting.folder / f"{name}.json" for name in ("asked", "found"))
        asked.write_text(json.dumps({"engine": self.engine(load), "requests": load.lines}), encoding="utf-8")
        command = [self.python, str(Path(__file__).with_name("in_vllm.py")), str(asked), str(found)]
        self.setting.run("vllm", command, self.environment)
        told = json.loads(found.read_text(encoding="utf-8"))
        return float(told["duration_s"]), sum(told["output_tokens"])

    def server(self, load: Load) -> AbstractContextManager[ServerProcess]:
        given = self.engine(load)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = ["--host=127.0.0.1", f"--port={port}", "--disable-uvicorn-access-log"]
        for name, value in given.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{'' if value else 'no-'}{flag}")
            else:
                flags.append(f"--{flag}={value}")
        return serving(
            "vllm",
            [self.python, *OWN_ENTRY, *flags],
            self.setting.log("vllm"),
            START_S,
            END_S,
            ready="/health",
            listens=r"Starting vLLM server on http://([\d.]+):(\d+)",
            environment={**self.setting.environment, **self.environment},
        )


def turn(side: BesideSide, load: Load, rate_per_s: float) -> dict[str, Any]:
    """Serve a load once; raises ValueError where an answer is not of its full length."""
    time.sleep(SETTLE_S)
    others = OtherLoad()
    time.sleep(WATCH_S)
    others_share, late = others.share(), ""
    if load.row.served:
        with side.server(load) as server:
            counted = plan(load, server.url, rate_per_s)
            measure(before(counted))
            found = measure(counted)
        duration_s, num_tokens = found["duration"], found["total_output_tokens"]
        figures = {name: found[of_client] for name, of_client in SERVED.items()}
        late = found["verdict"]["refused"].get("client on time", "")
    else:
        (duration_s, num_tokens), figures = side.at_once(load), {}
    if num_tokens != load.output_tokens:
        raise ValueError(f"{load.row.name}: {num_tokens} tokens came of {load.output_tokens} asked for")
    return {
        "output_tokens_per_s": round(num_tokens / duration_s, 2),
        "requests_per_s": round(len(load.lines) / duration_s, 4),
        **figures,
        "output_tokens": num_tokens,
        "others": round(others_share, 4),
        "late": late,
    }


def plan(load: Load, url: str, rate_per_s: float) -> ServePlan:
    """Return how the client sends a load."""
    asks, _ = read_requests(load.path, skip_bad=False)
    return ServePlan(
        base_url=url,
        asks=asks,
        trace=load.path.name,
        trace_sha256=digest(load.path),
        request_rate=rate_per_s,
        seed=SEED,
        request_timeout_s=3600.0,
    )


def before(counted: ServePlan) -> ServePlan:
    """Return the same load all at once, with prompts reversed so that the counted one finds none cached.

    It leaves a server with compiled code, and with its cache's memory, which systems give as it is written.
    It has no warm-up of its own, which would reverse a prompt again and so leave a counted one in the cache.
    """
    asks = tuple(replace(each, content=each.content[::-1]) for each in counted.asks)
    return replace(counted, asks=asks, request_rate=math.inf, num_warmups=0)


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return medians, spreads and the ratio of a row; `unsaid` says why there is no ratio."""
    sides: dict[str, Any] = {}
    for name, found in runs.items():
        rates = [each["output_tokens_per_s"] for each in found]
        names = [each for each in found[0] if each not in ("others", "late")]
        medians = {each: statistics.median(run[each] for run in found) for each in names}
        spread = round((max(rates) - min(rates)) / medians["output_tokens_per_s"], 4)
        sides[name] = {**medians, "spread": spread, "runs": list(found)}
    busiest = max(run["others"] for found in runs.values() for run in found)
    late = next((run["late"] for found in runs.values() for run in found if run["late"]), "")
    unsaid = ""
    if busiest > QUIET:
        unsaid = f"others took {busiest:.0%} of the processor time before a turn; {QUIET:.0%} is the most"
    elif late:
        unsaid = late
    ours, theirs = (sides[name]["output_tokens_per_s"] for name in ("ours", "vllm"))
    return {**sides, "ratio": None if unsaid else round(ours / theirs, 3), "unsaid": unsaid}


def check(recipe: Recipe, python: str) -> None:
    """Raise ValueError, with what to do, for a comparison that is not possible."""
    if recipe.device.kind != "cpu":
        raise ValueError(
            f"device.kind is {recipe.device.kind!r}; vLLM is compared with on a CPU: device.kind=cpu"
        )
    if recipe.model.config is None or recipe.model.weights != "random":
        raise ValueError(
            "both engines draw weights of their own; name a recipe with model.config, such as"
            " recipes/bench/llama_125m.yaml"
        )
    if not Path(python).is_file():
        raise ValueError(
            f"there is no {python}: run `bash scripts/setup.sh vllm`, or name a Python with vLLM by --python"
        )


def shared_environment(python: str, threads: int) -> dict[str, str]:
    """Return the variables of both engines: threads, and the libraries that vLLM is best started with."""
    prefix = Path(python).parent.parent
    found = [
        *prefix.glob("lib/python*/site-packages/vllm/libs/libtcmalloc*.so*"),
        *prefix.glob("lib/libiomp5.so"),
    ]
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": ":".join(map(str, found))} if found else {}),
    }


def loads_of(rows: Sequence[BesideRow], recipe: Recipe, folder: Path, num_requests: int) -> list[Load]:
    """Draw the requests of the rows, and write them."""
    vocab_size = model_config(recipe).vocab_size
    found = []
    for row in rows:
        load = Load(row, folder / f"{row.name}.jsonl", row.lines(vocab_size, num_requests))
        load.path.write_text("".join(json.dumps(each) + "\n" for each in load.lines), encoding="utf-8")
        found.append(load)
    return found


def write_model(recipe: Recipe, folder: Path, longest: int) -> None:
    """Write the folder of a model without weights: its configuration, and a word for each token."""
    from tokenizers import (  # imported here, with the next, because it takes seconds
        Tokenizer,
        decoders,
        models,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder.mkdir()
    config = dict(recipe.model.config or {})
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    config["max_position_embeddings"] = max(longest, int(config.get("max_position_embeddings", 0)))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {f"w{token}": token for token in range(model_config(recipe).vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")


def versions_of(python: str) -> str:
    """Return what vLLM's own environment has installed of what computes."""
    code = (
        "from importlib.metadata import distributions as d\n"
        "names = ('vllm', 'vllm-cpu', 'torch', 'transformers')\n"
        "found = {each.metadata['Name']: each.version for each in d() if each.metadata['Name'] in names}\n"
        "print(', '.join(f'{name} {found[name]}' for name in names if name in found))"
    )
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compare both in each row that is asked for; raises ValueError for what cannot be compared."""
    recipe = recipe_of(options)
    asked = options.row or [each.name for each in ROWS]
    if "steady" in asked and options.rate is None:
        asked = [*asked, "burst"]  # The steady arrivals follow its rate
    rows = [each for each in ROWS if each.name in asked]
    python = options.python or str(ROOT / ENVIRONMENT / "bin/python")
    check(recipe, python)
    threads = options.threads or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="beside-") as name:
        setting = Setting(recipe, Path(name), threads, shared_environment(python, threads))
        loads = loads_of(rows, recipe, setting.folder, options.requests)
        write_model(recipe, setting.model, max(each.longest for each in loads))
        profile = [] if options.profile is None else ["--profile", options.profile]
        sides: dict[str, BesideSide] = {
            "ours": OwnSide(setting, options.recipe, [*options.overrides, *profile]),
            "vllm": VllmSide(setting, python),
        }
        found: dict[str, Any] = {}
        for load in loads:
            rate_per_s = math.inf
            if load.row.steady:
                rate_per_s = options.rate or SHARE * min(
                    found["burst"][each]["requests_per_s"] for each in sides
                )
            found[load.row.name] = compared(sides, load, rate_per_s, options.rounds)
    return {
        "threads": threads,
        "preloaded": setting.environment.get("LD_PRELOAD", ""),
        "vllm": versions_of(python),
        "requests": options.requests,
        "rows": found,
    }


def compared(sides: Mapping[str, BesideSide], load: Load, rate_per_s: float, rounds: int) -> dict[str, Any]:
    """Serve a load by both in turns, and sum it up."""

    def taken(name: str, number: int) -> dict[str, Any]:
        found = turn(sides[name], load, rate_per_s)
        told = found["output_tokens_per_s"]
        print(f"{load.row.name} {number + 1}/{rounds} {name}: {told} tokens/s", file=sys.stderr)
        return found

    runs = in_turns({name: partial(taken, name) for name in sides}, rounds, warm_ups=0)
    sent = {"sent_per_s": round(rate_per_s, 4)} if load.row.steady else {}
    return {"what": load.row.title, **sent, **summary(runs)}


def print_table(result: Mapping[str, Any]) -> None:
    """Print the rows in Markdown; the runs stand in brackets behind their median."""
    rows = []
    for found in result["rows"].values():
        what, sides = found["what"], [found[name] for name in ("vllm", "ours")]
        if "sent_per_s" in found:
            what += f" ({found['sent_per_s']:g} requests/s)"
        for name in ("output_tokens_per_s", *SERVED):
            if name not in sides[0]:
                continue
            cells = []
            for side in sides:
                runs = ", ".join(f"{run[name]:g}" for run in side["runs"])
                cells.append(f"{side[name]:g} ({runs})")
            said = ""
            if name == "output_tokens_per_s":
                said = "none" if found["ratio"] is None else f"{found['ratio']:g}"
            rows.append((what, name.replace("_per_s", "/s").replace("_", " "), *cells, said))
    print(markdown(("what", "figure", "vLLM", "ours", "ours / vLLM"), rows))
    for name, found in result["rows"].items():
        if found["unsaid"]:
            print(f"{name}: no ratio, because {found['unsaid']}")
    print(f"{result['vllm']}; {result['threads']} threads; preloaded: {result['preloaded'] or 'nothing'}")
