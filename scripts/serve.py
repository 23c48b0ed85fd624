"""Serve a recipe's model to many clients over HTTP.

    python -m scripts.serve RECIPE [key=value ...] [--host 127.0.0.1] [--port 8000]
    python -m scripts.serve FOLDER of a checkpoint, or ORG/NAME of a downloaded one, in place of RECIPE

The server speaks OpenAI's API at /v1. SIGTERM, or ctrl-C, lets running requests come to their end
(`server.drain_s`); a second one does not wait. The server listens on this machine alone unless --host says
otherwise; give keys where others can reach it: --api-keys FILE, or the environment's API_KEY.
"""

from __future__ import annotations

import argparse
import os

from borders.numbers import PORTS
from recipes.fitting import with_recipe
from recipes.schema import verb
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import option
from serving.metrics.logs import FORMATS
from serving.server import ServerOptions, run_server


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.serve", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_recipe(top)
    top.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    top.add_argument("--port", type=option(PORTS), default=8000, help="0: any that is free, which is logged")
    top.add_argument(
        "--served-model-name", dest="model_name", metavar="NAME", help="what clients call the model"
    )
    top.add_argument(
        "--api-keys", metavar="FILE", help="KEY [TENANT or *] [max_priority=N] a line; see docs/serving.md"
    )
    add_tls(top)
    top.add_argument("--batches", metavar="FOLDER", help="keep files and batches there; none if not given")
    top.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        dest="cors_origins",
        metavar="URL",
        help="a web page's origin whose scripts may ask, or *; may be repeated",
    )
    top.add_argument(
        "--otlp-endpoint", metavar="URL", help="where OpenTelemetry's spans go; none if not given"
    )
    top.add_argument("--log-format", choices=FORMATS, default="text", help="json: an object a line")
    top.add_argument("--log-requests", action="store_true", help="a line for each request, without its text")
    return top


def add_tls(top: argparse.ArgumentParser) -> None:
    """Add the files by which HTTP is encrypted."""
    add = top.add_argument
    add("--tls-certificate", metavar="FILE", help="PEM: speak HTTPS with it; none: HTTP")
    add("--tls-private-key", metavar="FILE", help="PEM: of that certificate, without a password")
    add("--tls-client-authority", metavar="FILE", help="PEM: answer only clients with its certificates")


def main(argv: list[str]) -> int:
    """Serve until a signal; returns 1 where no engine could be started."""
    options = parser().parse_intermixed_args(with_recipe("scripts.serve", argv))
    return run_server(ServerOptions(**vars(options)))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    verb.run(main)
