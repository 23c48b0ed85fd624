"""How fast is it? `python -m scripts.benchmark host|kv|offline|beside|device|stall ...`"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from scripts import verb
from scripts.benchmark import host, machine, queues

if TYPE_CHECKING:
    from scripts.benchmark.device import Load


def numbers(text: str) -> list[int]:
    """A comma-separated list of positive integers."""
    values = [int(each) for each in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each must be at least 1")
    return values


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    on_host = verbs.add_parser("host", help="what a step costs the host, with a device that answers at once")
    on_host.add_argument("--slots", type=numbers, default=[64, 256, 1024, 4096], metavar="N,N,...")
    on_host.add_argument("--page-sizes", type=numbers, default=[16, 128], metavar="N,N,...")
    on_host.add_argument(
        "--chunk", type=int, default=512, metavar="TOKENS", help="the new prompt in each step"
    )
    on_host.add_argument("--steps", type=int, default=300, metavar="N")
    on_host.add_argument(
        "--waiting", type=int, metavar="N", help="instead: under each policy and order, while so many wait"
    )
    on_host.add_argument("--json", action="store_true", help="print JSON rather than a table")
    of_pages = verbs.add_parser("kv", help="what pages cost: to find, name, take, copy, and leave half empty")
    of_pages.add_argument("--page-sizes", type=numbers, default=[16, 128], metavar="N,N,...")
    of_pages.add_argument("--repeats", type=int, default=25, metavar="N")
    of_pages.add_argument("--requests", type=int, default=1000, metavar="N", help="in the trace of lengths")
    of_pages.add_argument("--json", action="store_true", help="print JSON rather than a table")
    for name, what in (
        ("offline", "throughput and latencies of a trace on an engine in this process"),
        ("beside", "the same, and transformers' own continuous batching of the same trace"),
    ):
        traced = verbs.add_parser(name, help=what)
        traced.add_argument("recipe")
        traced.add_argument("overrides", nargs="*", metavar="key=value")
        traced.add_argument(
            "--profile", metavar="NAME", help="a name in recipes/profiles, such as low_latency"
        )
        traced.add_argument(
            "--trace", required=True, metavar="FILE.jsonl", help="requests, as `generate` reads them"
        )
        traced.add_argument(
            "--runs", type=int, default=1, metavar="N", help="counted runs; the median is told"
        )
        traced.add_argument("--json", action="store_true", help="print JSON rather than a table")
    steps = verbs.add_parser("device", help="single steps, against what the device copies and multiplies")
    steps.add_argument("recipe")
    steps.add_argument("overrides", nargs="*", metavar="key=value")
    steps.add_argument("--decode", default="1x1024,32x1024,256x1024", metavar="COUNTxCONTEXT,...")
    steps.add_argument("--prefill", default="4x4096", metavar="COUNTxTOKENS,...")
    steps.add_argument("--mixed", default="32x1024+1x2048", metavar="DECODES+PROMPTS,...")
    steps.add_argument("--repeats", type=int, default=20, metavar="N")
    steps.add_argument("--json", action="store_true", help="print JSON rather than a table")
    stalls = verbs.add_parser(
        "stall", help="what long prompts cost those who are being answered, whole and in chunks"
    )
    stalls.add_argument("recipe")
    stalls.add_argument("overrides", nargs="*", metavar="key=value")
    stalls.add_argument("--prompt-tokens", type=int, default=4096, metavar="N")
    stalls.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="between two long prompts"
    )
    stalls.add_argument("--prompts", type=int, default=10, metavar="N", help="long prompts")
    stalls.add_argument("--answers", type=int, default=16, metavar="N", help="that run beside them")
    stalls.add_argument("--answer-tokens", type=int, default=256, metavar="N")
    stalls.add_argument("--chunk", type=int, default=128, metavar="TOKENS")
    stalls.add_argument("--json", action="store_true", help="print JSON rather than a table")
    return top


def print_host(rows: list[dict[str, object]]) -> None:
    """Rows of the host benchmark as a table."""
    columns = [name for name in rows[0] if name not in ("slots", "page_size")]
    print("µs a step, p50 / p99".ljust(24) + "".join(name.replace("_", " ").rjust(36) for name in columns))
    for row in rows:
        cells = [row[name] for name in columns]
        texts = [f"{cell['p50_us']} / {cell['p99_us']}" for cell in cells if isinstance(cell, dict)]
        print(
            f"{row['slots']:>6} slots, page {row['page_size']}".ljust(24)
            + "".join(t.rjust(36) for t in texts)
        )


def main(argv: list[str]) -> None:
    """Run one benchmark and print its result."""
    options = parser().parse_args(argv)
    if options.verb == "host" and options.waiting is not None:
        waited = {each: list(queues.run(each, options.waiting, options.steps)) for each in options.slots}
        if options.json:
            result = {"machine": machine.describe(), "waiting": options.waiting, "slots": waited}
            print(json.dumps(result, indent=2))
        else:
            queues.print_table(waited, options.waiting)
        return
    if options.verb == "host":
        rows = host.run(options.slots, options.page_sizes, options.chunk, options.steps)
        if options.json:
            print(json.dumps({"machine": machine.describe(), "host": rows}, indent=2))
        else:
            print_host(rows)
        return
    if options.verb == "kv":
        from scripts.benchmark import kv  # torch, which the host benchmark does without

        pages = kv.run(options.page_sizes, options.repeats, options.requests)
        if options.json:
            print(json.dumps({"machine": machine.describe(), **pages}, indent=2))
        else:
            kv.print_table(pages)
        return
    if options.verb == "device":
        from scripts.benchmark import device

        steps = device.run(options.recipe, options.overrides, *_loads(options), options.repeats)
        if options.json:
            print(json.dumps(steps, indent=2))
        else:
            device.print_table(steps)
        return
    from scripts.benchmark import beside, offline, stall

    if options.verb == "stall":
        load = stall.Load(
            options.prompt_tokens,
            options.every,
            options.prompts,
            options.answers,
            options.answer_tokens,
            options.chunk,
        )
        stalled = stall.run(options.recipe, options.overrides, load)
        if options.json:
            print(json.dumps(stalled, indent=2))
        else:
            offline.print_table(stalled)
        return
    way = beside if options.verb == "beside" else offline
    result = way.run(options.recipe, options.overrides, options.profile, options.trace, options.runs)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        offline.print_table(result)


def _loads(options: argparse.Namespace) -> tuple[list[Load], list[Load]]:
    """The loads by themselves, and the mixed ones."""
    from scripts.benchmark.device import Load, pair

    alone = [Load(*pair(each)) for each in options.decode.split(",") if each]
    alone += [Load(0, 0, *pair(each)) for each in options.prefill.split(",") if each]
    mixed = []
    for each in filter(None, options.mixed.split(",")):
        decodes, _, prompts = each.partition("+")
        mixed.append(Load(*pair(decodes), *pair(prompts)))
    return alone, mixed


if __name__ == "__main__":
    verb.run(main)
