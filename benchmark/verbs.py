"""Declare every benchmark and simulation once: its name, its help, its function and its options.

The parsers of `scripts.benchmark` and `scripts.simulate`, their help, and the list in docs/benchmarks.md (by
`python -m scripts.benchmark --list`) derive from these tables. Functions are named by module, since some
import torch and some do not; a module is imported only when its verb runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmark import options as kinds
from benchmark.options import markdown, rate, show
from benchmark.run_record import RunClock
from benchmark.workloads.synthetic import arrivals, lengths, levels, shared_prompts, shares
from continuous_batching.routing.routing import ROUTES
from recipes.fitting import with_recipe
from recipes.schema.command_line import add_recipe, with_keys
from recipes.schema.numbers import (
    MOST_COUNT,
    MOST_SEED,
    MOST_TOKENS,
    MOST_WAIT_S,
    RATES_PER_S,
    real,
    whole,
    wholes,
)


class Option(NamedTuple):
    """One option: its flag, and what argparse needs to know of it."""

    flag: str
    given: Mapping[str, Any]


def option(
    flag: str,
    type: Callable[[str], Any] = str,
    metavar: str | None = None,
    help: str = "",
    default: Any = None,
    **more: Any,
) -> Option:
    """Declare an option with a value; its help names its default, unless that has no short form."""
    if isinstance(default, (int, float, str)):
        help = f"{help} (default: {default})".lstrip()
    return Option(flag, {"type": type, "metavar": metavar, "help": help, "default": default, **more})


def switch(flag: str, help: str) -> Option:
    """Declare an option without a value."""
    return Option(flag, {"action": "store_true", "help": help})


def count(flag: str, default: int | None, help: str = "", least: int = 1, most: int = MOST_COUNT) -> Option:
    """Declare an option that takes a whole number."""
    return option(flag, whole(least, most), "N", help, default)


@dataclass(frozen=True, slots=True)
class Verb:
    """One benchmark or simulation; of several of one name, all but the first have an option, `mode`.

    `run` and `table` are functions by their module in `benchmark`. `run` takes the parsed options and returns
    a result, which `table` prints, or prints by itself and returns None. A result with a `result` name is
    completed by that name, the recipe, the machine and the clocks; where it is `judged`, the gate adds its
    verdict.
    """

    title: str  # the words that start it
    help: str
    run: str
    options: tuple[Option, ...]
    table: str = "options:print_figures"
    takes_recipe: bool = True
    result: str = ""
    judged: bool = False

    @property
    def name(self) -> str:
        return self.title.partition(" --")[0]

    @property
    def mode(self) -> str:
        return self.title.partition(" --")[2]


def verb(title: str, help: str, run: str, *options: Option, **more: Any) -> Verb:
    """Declare a verb, or a way of one."""
    return Verb(title, help, run, options, **more)


REQUESTS = "requests, as `generate` reads them"
TRACE = option("--trace", metavar="FILE.jsonl", help=REQUESTS, required=True)
RUNS = count("--runs", 1, "counted runs; the median is reported")
SEED = count("--seed", 0, least=0, most=MOST_SEED)
LOAD = (  # what is sent to a server, and where; names are those of `vllm bench serve`
    option("--base-url", kinds.url, "URL", "of any OpenAI-compatible server", required=True),
    option("--trace", Path, "FILE.jsonl", REQUESTS, required=True),
    switch("--skip-bad", "report lines that cannot be read, and go on"),
    option("--endpoint", metavar="PATH", help="if not /v1/completions, for chats /v1/chat/completions"),
    option("--model", metavar="NAME", help="if not the first that the server names"),
    count("--num-prompts", None, "the first N of the trace", most=10**9),
    count("--max-concurrency", None, "most requests on their way at once"),
    count("--num-warmups", 1, "requests before, not counted", least=0),
    count("--seed", 0, "of drawn arrivals, and of requests without a seed", least=0, most=MOST_SEED),
    switch("--ignore-eos", "every answer goes to its full length"),
    Option("--extra-body", {"type": kinds.body, "default": {}, "metavar": "JSON",
                            "help": "fields for every request; null: none"}),
    option("--goodput", kinds.objective, "NAME:MS", "objectives: ttft, tpot, itl, e2el", nargs="+"),
    option("--request-timeout-s", real(1e-3, MOST_WAIT_S), "SECONDS", default=600.0),
    option("--ready-check-timeout-sec", real(0, MOST_WAIT_S), "S", "for a server that starts", 60.0),
)  # fmt: skip
BESIDE_ROWS = ("at-once", "burst", "steady", "shared", "long")  # named here, as importing them takes seconds
BENCHMARKS = (
    verb("host", "what a step costs the host, with a device that answers at once",
         "micro.host:run",
         option("--slots", wholes(2, 2**16), "N,N,...", default=[64, 256, 1024, 4096]),
         option("--page-sizes", wholes(1, 2**16), "N,N,...", default=[16, 128]),
         count("--chunk", 512, "tokens of the new prompt in each step", 0, 2**16),
         count("--steps", 300),
         table="micro.host:print_table", takes_recipe=False, result="host", judged=True),
    verb("device", "single steps, against what the device copies and multiplies",
         "micro.device:run",
         option("--decode", metavar="COUNTxCONTEXT,...", default="1x1024,32x1024,256x1024"),
         option("--prefill", metavar="COUNTxTOKENS,...", default="4x4096"),
         option("--mixed", metavar="DECODES+PROMPTS,...", default="32x1024+1x2048"),
         count("--repeats", 20),
         table="micro.device:print_table", result="device", judged=True),
    verb("device --launches", "what a decode step asks of an NPU: launches, copies, waits",
         "micro.launches:run",
         table="micro.launches:print_table", result="launches"),
    verb("offline", "throughput and latencies of a trace, on an engine in this process",
         "offline.offline:run",
         TRACE,
         RUNS,
         judged=True),
    verb("beside", "`offline` beside `transformers` in static batches",
         "offline.offline:run_beside",
         TRACE,
         RUNS,
         count("--static", 32, "requests of a batch"),
         judged=True),
    verb("beside --vllm", "the same loads in turns with vLLM's build for a CPU, offline and served",
         "offline.beside_vllm:run",
         Option("--row", {"nargs": "+", "choices": BESIDE_ROWS, "metavar": "ROW",
                "help": f"of {', '.join(BESIDE_ROWS)} (all)"}),
         count("--rounds", 5, "turns of both, of which the median counts"),
         count("--requests", 64, "of a row; of long, an eighth"),
         option("--rate", real(*RATES_PER_S), "PER_S", "of steady; if not, 0.7 of the slower burst"),
         count("--threads", None, "of each engine; if not, one for each core"),
         option("--python", metavar="FILE", help="of vLLM's environment (.venv/vllm/bin/python)"),
         table="offline.beside_vllm:print_table", result="beside", judged=True),
    verb("serve", "what clients see of any OpenAI-compatible server",
         "serve.measure:run",
         *LOAD,
         option("--request-rate", rate, "PER_S", "Poisson, or inf; if not, the trace's own times"),
         switch("--save-result", "write the result, with a record of each request"),
         Option("--result-dir", {"type": kinds.folder, "default": Path(), "metavar": "FOLDER"}),
         option("--result-filename", metavar="NAME"),
         table="serve.measure:print_table", takes_recipe=False),
    verb("serve --fleet", "what a router that knows pages brings, with real servers behind it",
         "serve.fleet:run",
         count("--replicas", 4, "servers"),
         count("--rounds", 3, "of each way, of which the median counts, after one that warms up"),
         count("--sessions", 48, "of a round"),
         count("--concurrent", 8, "sessions at once"),
         count("--events-port", 15_550,
                "the first of the servers' ports for events of pages; every tenth is taken"),
         table="serve.fleet:print_table", result="fleet"),
    verb("serve --overload", "what a server does with several times the requests that it takes, for minutes",
         "serve.overload:run",
         option("--minutes", real(0.01, 24 * 60), "N", default=30.0),
         count("--accepted", 64, "samples at once: server.max_requests", least=2, most=2**16),
         option("--output-tokens", lengths, "LENGTHS", default="lognormal:40:0.8"),
         table="serve.overload:print_table", result="overload"),
    verb("serve --router-cost",
         "what that router itself takes: latency and processor time, beside the least proxy",
         "serve.router:run",
         count("--replicas", 2, "servers behind the router"),
         count("--turns", 5, "of which the median counts, after one that warms up"),
         count("--requests", 500, "of each way in a turn"),
         count("--pieces", 200, "of a stream", least=2),
         count("--every-ms", 5, "between two of these"),
         table="serve.router:print_table", takes_recipe=False, result="router"),
    verb("sweep", "`serve` at one rate after the other, with a page",
         "serve.measure:run_sweep",
         *LOAD,
         option("--request-rates", kinds.rates, "PER_S,...", "such as 1,2,4,inf", required=True),
         option("--result-dir", kinds.folder, "FOLDER", "a file for each rate, and a page", required=True),
         table="", takes_recipe=False),
    verb("collective", "how long the ranks of a recipe wait for each other, by size",
         "micro.collective:run",
         option("--sizes", wholes(4, 2**32), "BYTES,...", "what a rank brings", [8 << 10, 64 << 10,
                512 << 10, 4 << 20]),
         count("--repeats", 20, "of a round"),
         table="micro.collective:print_table", result="collective"),
    verb("speculation", "what drafts bring, by kind, text and load, beside plain decoding in the same run",
         "offline.speculation:run",
         option("--loads", wholes(1, 2**16), "N,N,...", "requests at once", [1, 4, 16, 32]),
         option("--kinds", metavar="KIND", nargs="+",
                help="such as \"ngram, throughput\"; a proposer, and throughput, source or fixed (all)"),
         count("--prompt", 32, "tokens", 8, MOST_TOKENS),
         count("--answer", 128, "tokens", 2, MOST_TOKENS),
         count("--most", 4, "drafts of a row in a step", most=64),
         count("--runs", 3),
         table="offline.speculation:print_table", result="speculation", judged=True),
    verb("report", "a page of one result, or of several beside one another",
         "serve.report:run",
         Option("results", {"nargs": "+", "type": Path, "metavar": "RESULT",
                "help": "one, or more to compare"}),
         Option("--output", {"type": Path, "default": Path("report.html"), "metavar": "FILE.html"}),
         table="", takes_recipe=False),
)  # fmt: skip

TRACE_MAKER = verb(
    "", "a trace: drawn lengths at drawn times, or those of a public trace", "",
    option("--from", kinds.source, "LAYOUT:FILE", ", ".join(kinds.LAYOUTS), dest="source"),
    switch("--skip-bad", "report lines that cannot be read, and go on"),
    option("--tokenizer", metavar="FOLDER", help="counts the tokens of sharegpt's answers"),
    count("--requests", None, "default: 64; where a file is read, at most so many", most=10**7),
    option("--rate", rate, "PER_S", "mean arrivals a second; inf if not given"),
    option("--arrivals", arrivals, "PROCESS", "poisson, gamma:CV, ramp:LAST_PER_S, closed:CLIENTS"),
    option("--prompt-tokens", lengths, "LENGTHS", "default: uniform:16:200"),
    option("--output-tokens", lengths, "LENGTHS", "default: uniform:8:48"),
    option("--system-prompts", shared_prompts, "COUNT:LENGTHS", "one begins each prompt"),
    option("--turns", lengths, "LENGTHS", "of a session"),
    option("--think-s", real(0, MOST_WAIT_S), "SECONDS", "mean time between the turns' arrivals"),
    option("--tenants", shares, "NAME=SHARE,..."),
    option("--priorities", levels, "LEVEL=SHARE,..."),
    count("--vocab-size", None, "ids go from 0 to N - 1 (default: 1024)", most=10**7),
    SEED,
    option("--output", kinds.file, "FILE.jsonl", required=True),
    table="", takes_recipe=False,
)  # fmt: skip

engines = whole(1, 10**6)  # most engines of a fleet
devices = wholes(1, 10**6)
milliseconds = real(1e-6, 1e9, endless=True)


def engine_pair(text: str) -> tuple[int, int]:
    """Parse engines for prompts and for answers from `P:D`."""
    prompts, _, answers = text.partition(":")
    return engines(prompts), engines(answers)


TENSOR = option("--tp", engines, "N", "devices that share each layer; else the recipe's own")
DEVICE = option("--device", metavar="NAME", help="a name in devices/profiles; else the recipe's own")
SIMULATED = (
    option("--trace", metavar="FILE", help=REQUESTS, required=True),
    switch("--skip-bad", "leave out lines that are no requests"),
    DEVICE,
)
SIMULATIONS = (
    verb("", "one trace, on one engine or several",
         "simulate.one_run:run",
         *SIMULATED,
         TENSOR,
         option("--pp", engines, "N", "stages of layers, each on devices of its own; else the recipe's"),
         option("--dp", engines, "N", "engines behind a router", 1),
         option("--route", help="how the router chooses (default: least_loaded)", choices=ROUTES),
         option("--split", engine_pair, "P:D", "engines for prompts, and engines for answers"),
         option("--split-by",
                help="which prompts those compute, as the router chooses (default: cost); none: --dp P+D",
                choices=("cost", "always")),
         option("--costs", Path, "COSTS.json", "what `fit` made, in place of the device's profile"),
         option("--timeline", kinds.file, "OUT.json", "write a time line for Perfetto")),
    verb("search", "the cheapest setting that meets the objectives",
         "simulate.one_run:run_search",
         *SIMULATED,
         option("--ttft-ms", milliseconds, "MS", "objective of the time to the first token", required=True),
         option("--itl-ms", milliseconds, "MS", "objective of the time between tokens", required=True),
         option("--percent", real(1e-3, 100), "P", "of each that must be within", 99.0),
         option("--tp", devices, "N,N,...", "devices that share each layer", [1, 2, 4, 8]),
         option("--dp", devices, "N,N,...", "engines behind a router", [1, 2, 4, 8]),
         option("--chunk", wholes(1, 2**31 - 1), "N,N,...", "scheduler.max_batch_tokens; else the recipe's"),
         option("--slots", wholes(1, 2**31 - 1), "N,N,...", "scheduler.num_slots; else the recipe's"),
         switch("--json", "print JSON rather than a table"),
         table=""),
    verb("routes", "the routes of a router beside one another",
         "simulate.one_run:run_ways",
         *SIMULATED,
         TENSOR,
         option("--dp", engines, "N", "engines behind the router", required=True),
         table="simulate.one_run:print_ways"),
    verb("splits", "who should compute prompts",
         "simulate.one_run:run_ways",
         *SIMULATED,
         TENSOR,
         option("--split", engine_pair, "P:D", "engines for prompts, and for answers; or all for both",
                required=True),
         table="simulate.one_run:print_ways"),
    verb("lengths", "one request alone, by the length of its prompt; sparse attention beside all tokens read",
         "simulate.one_run:run_lengths",
         DEVICE,
         TENSOR,
         option("--tokens", wholes(1, MOST_TOKENS), "N,N,...", "tokens of the prompt", [8192, 32768, 131072]),
         table="simulate.one_run:print_lengths"),
    verb("states", "what must be computed of prompts by where recurrent states are kept, on five workloads",
         "simulate.states:run",
         option("--memory-gib", wholes(1, 2**16), "GIB,...", "for pages and kept states", [8, 32]),
         option("--host-gib", whole(0, 2**16), "GIB", "of a host tier for our rules", 0),
         option("--seeds", wholes(0, MOST_SEED), "N,N,...", "of the drawn workloads (40)"),
         count("--slots", 8, "requests that run at once", most=1024),
         table="simulate.states:print_table", takes_recipe=False),
    verb("fit", "costs of steps from a recording, for --costs",
         "recordings:run_fit",
         Option("recording", {"help": "made with scheduler.record=FILE"}),
         option("--output", kinds.file, "COSTS.json", required=True),
         table="", takes_recipe=False),
)  # fmt: skip


def listed() -> str:
    """Return the benchmarks as the table of docs/benchmarks.md."""
    return markdown(("verb", "what it measures"), [(f"`{verb.title}`", verb.help) for verb in BENCHMARKS])


def chosen(verbs: Sequence[Verb], name: str, arguments: Sequence[str]) -> Verb:
    """Return the verb of this name, in the mode that one of the arguments names."""
    own, *modes = (each for each in verbs if each.name == name)
    return next((each for each in modes if f"--{each.mode}" in arguments), own)


def parser_of(verb: Verb, prog: str, modes: Sequence[Verb] = ()) -> argparse.ArgumentParser:
    """Return the parser of a verb; the help of its own mode names the others."""
    others = "".join(f"\n  --{each.mode:10} {each.help}" for each in modes)
    text = f"{verb.help}." + (f"\n\nOr, each with its own --help:{others}" if others else "")
    parser = argparse.ArgumentParser(
        prog=f"{prog} {verb.title}".rstrip(),
        description=text[:1].upper() + text[1:],
        formatter_class=argparse.RawTextHelpFormatter,
    )
    if verb.mode:
        parser.add_argument(f"--{verb.mode}", action="store_true", dest="mode", help=argparse.SUPPRESS)
    if verb.takes_recipe:
        add_recipe(parser)
    for each in verb.options:
        parser.add_argument(each.flag, **each.given)
    if verb.table:
        parser.add_argument("--json", action="store_true", help="print JSON rather than a table")
    return parser


def function(path: str) -> Callable[..., Any]:
    """Import a function of a verb; raises ValueError where a package that it needs is not installed."""
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(f"benchmark.{module}"), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; bash scripts/setup.sh bench installs it") from error
    return found


def run(verb: Verb, options: argparse.Namespace) -> None:
    """Run a verb, and print its result."""
    act, clock = function(verb.run), RunClock()
    result = act(options)
    if result is None:
        return
    if verb.result:
        from recipes.assembly import versions

        result = {"machine": versions.describe(), "clock": clock.read(), **result}
        asked = ("recipe", "overrides", "profile") if verb.takes_recipe else ()
        result = {"benchmark": verb.result, **{name: getattr(options, name) for name in asked}, **result}
    if verb.judged:
        from benchmark.gate.gate import with_verdict

        result = with_verdict(result)
    show(result, as_json=options.json, print_table=function(verb.table))


def main(argv: list[str]) -> None:
    """Run one benchmark."""
    prog = "python -m scripts.benchmark"
    names = dict.fromkeys(each.name for each in BENCHMARKS)
    lines = "\n".join(f"{each.title:24}{each.help}" for each in BENCHMARKS)
    text = f"Measure speed; each verb has its own --help.\n\n{lines}"
    top = argparse.ArgumentParser(prog=prog, description=text, formatter_class=argparse.RawTextHelpFormatter)
    top.add_argument("--list", action="store_true", help="print the list of docs/benchmarks.md")
    top.add_argument("verb", nargs="?", choices=names, metavar="VERB")
    first = top.parse_args(argv[:1])
    if first.list:
        print(listed())
        return
    if first.verb is None:
        top.error("name a VERB")
    verb = chosen(BENCHMARKS, first.verb, argv[1:])
    modes = [each for each in BENCHMARKS if each.name == verb.name and each.mode and not verb.mode]
    given = with_recipe("scripts.benchmark", argv) if verb.takes_recipe else argv
    run(verb, parser_of(verb, prog, modes).parse_intermixed_args(given[1:]))


def simulate(argv: list[str]) -> None:
    """Run one simulation; without a verb, one trace is served."""
    own, *others = SIMULATIONS
    one = next((each for each in others if argv[:1] == [each.name]), own)
    parser = parser_of(one, "python -m scripts.simulate")
    parser.description = f"SIMULATED, not measured: {one.help}."
    if one is own:
        verbs = "".join(f"\n  {each.name:10} {each.help}" for each in others)
        parser.description += f"\n\nOr a verb, each with its own --help:{verbs}"
    given = with_keys(argv[1:] if one.name else argv, verb="simulate")
    run(one, parser.parse_intermixed_args(given))
