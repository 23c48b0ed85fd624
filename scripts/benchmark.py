"""Measure speed: `python -m scripts.benchmark VERB ...`; each verb has its own --help."""

from __future__ import annotations

import argparse
from importlib import import_module

from recipes.schema import verb

VERBS = {  # a verb's module is imported only when it runs, since some import torch and some do not
    "serve": ("serve.command", "what clients see of a server, ours or another's"),
    "sweep": ("serve.sweep", "the same at one rate, and one setting, after the other, with a page"),
    "fleet": ("serve.fleet", "what a router that knows pages brings, with real servers behind it"),
    "router": ("serve.router", "what the router takes: time, latency, and memory for streams that are open"),
    "tier": ("serve.tier", "what pages on disk or in Redis spare a server that is started again"),
    "report": ("serve.report", "a page of one result, or of several beside one another"),
    "offline": ("offline.offline", "throughput and latencies of a trace on an engine in this process"),
    "throughput": ("offline.throughput", "tokens a second when all requests are there at once"),
    "latency": ("offline.latency", "how long a batch of requests of one size takes"),
    "beside": (
        "offline.transformers_beside",
        "the same, beside transformers' own continuous or static batches",
    ),
    "device": ("micro.device", "single steps, against what the device copies and multiplies"),
    "launches": ("micro.launches", "what a decode step asks of an NPU: launches, copies and waits"),
    "parts": ("micro.parts", "where the time of a step on a CPU goes, part by part"),
    "stall": ("offline.stall", "what long prompts cost those who are being answered, whole and in chunks"),
    "speculation": ("offline.speculation", "what drafts bring, by text and by load, beside plain decoding"),
    "drafts": ("simulate.speculation_gain", "what drafts would bring on a simulated device"),
    "host": ("micro.host", "what a step costs the host, with a device that answers at once"),
    "followed": ("micro.followed", "what a rank that follows costs the one that leads"),
    "collective": ("micro.collective", "how long the ranks of a recipe wait for each other, by size"),
    "ranks": ("micro.shared_steps", "how long tensor ranks take for a step, and what the simulation says"),
    "stages": ("micro.stages", "how long stages of layers wait for each other, and what the simulation says"),
    "adapters": ("micro.adapters", "what adapters of requests cost beside none"),
    "masks": ("micro.masks", "what it costs to hold answers to a form, beside none and the bare library"),
    "schemas": ("serve.hostile_schemas", "how long hostile schemas hold up a client who streams beside them"),
    "simulation": ("micro.simulation", "simulated tokens a second, with the real scheduler"),
    "cache-types": ("micro.cache_types", "what keys and values in int8 change in answers and in attention"),
    "kv": ("micro.kv", "what pages cost: to find, name, take, copy, and leave half empty"),
}


def main(argv: list[str]) -> None:
    """Run one benchmark and print its result."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.benchmark",
        description="\n".join(
            [__doc__ or "", "", *(f"{name:12}{what}" for name, (_, what) in VERBS.items())]
        ),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    top.add_argument("verb", choices=VERBS, metavar="VERB")
    name = top.parse_args(argv[:1]).verb
    module = import_module(f"benchmark.{VERBS[name][0]}")
    parser = argparse.ArgumentParser(
        prog=f"{top.prog} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    module.add_arguments(parser)
    module.main(parser.parse_intermixed_args(argv[1:]))


if __name__ == "__main__":
    verb.run(main)
