"""Try client libraries on a server of our own, and print a table of what came out.

    python -m scripts.clients [--only NAME ...] [--environment .venv/clients]

`bash scripts/setup.sh clients` installs the libraries; this installs nothing. A server of
`recipes/tiny/agent.yaml` is started on loopback. Each library asks it for an answer, a stream, an agent's
loop with two tools, and an answer by a schema, as far as it has them (tried.py, tried.mjs). The status is 1
if anything went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from recipes.schema import verb
from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S
from tests.serving.clients.tried import CLIENTS, WAYS
from tests.serving.server import started

HERE = Path(__file__).parent
APART = ROOT / ".venv/clients"
OLDER = ("instructor", "llama-index")  # need older versions of what the others need: see older.txt
HEADS = ("client", "version", "chat", "stream", "tools", "structured output")


def main(argv: list[str]) -> int:
    """Try clients, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.clients",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--environment", type=Path, default=APART, metavar="DIR", help="where they are installed"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of all clients, these")
    options = parser.parse_args(argv)
    environment = options.environment.resolve()
    if not (environment / "bin/python").exists():
        raise ValueError(f"there is no environment {environment}: run `bash scripts/setup.sh clients`")
    with tempfile.TemporaryDirectory() as folder:
        commands = {**python_clients(environment), **node_clients(environment, Path(folder))}
        if unknown := sorted({*options.only} - commands.keys()):
            raise ValueError(f"there is no client {', '.join(unknown)}; there is: {', '.join(commands)}")
        server = started(("recipes/tiny/agent.yaml",))
        try:
            found = {
                name: tried([*command, name, server.url], name)
                for name, command in commands.items()
                if not options.only or name in options.only
            }
        finally:
            server.close()
    print(table(found))
    problems = [
        f"{name}, {way}: {said}"
        for name, result in found.items()
        for way, said in result["ways"].items()
        if said not in ("ok", "none")
    ]
    print("\n".join(["", *problems]))
    return 1 if problems else 0


def python_clients(environment: Path) -> dict[str, list[str | Path]]:
    """The command that tries each client in Python, without its arguments."""
    return {name: [environment / "bin/python", HERE / "tried.py"] for name in CLIENTS}


def node_clients(environment: Path, folder: Path) -> dict[str, list[str | Path]]:
    """The command that tries each client for Node.js; none without it.

    Node.js looks for packages beside the script, which therefore stands in a folder beside them.
    """
    node = shutil.which("node")
    if node is None or not (environment / "node_modules").exists():
        print("without Node.js, or what npm installs for it: its clients are not tried")
        return {}
    script = Path(shutil.copy(HERE / "tried.mjs", folder))
    (folder / "node_modules").symlink_to(environment / "node_modules")
    said = subprocess.run([node, script], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return {f"{name} (npm)": [node, script] for name in json.loads(said.stdout)}


def tried(command: list[str | Path], name: str) -> dict[str, Any]:
    """What one client says, in a process of its own."""
    command = [*command[:-2], str(command[-2]).removesuffix(" (npm)"), command[-1]]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AI_SDK_LOG_WARNINGS": "false"}
    if name in OLDER:
        own["PYTHONPATH"] = str(Path(command[0]).parents[1] / "older")
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=PATIENCE_S)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"version": "?", "ways": dict.fromkeys(WAYS, last)}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def table(found: dict[str, dict[str, Any]]) -> str:
    """What came out, as a Markdown table."""
    rows = [
        [f"`{name}`", result["version"], *(_shown(result["ways"][way]) for way in WAYS)]
        for name, result in found.items()
    ]
    lines = [[*HEADS], ["---"] * len(HEADS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _shown(said: str) -> str:
    return {"ok": "yes", "none": ""}.get(said, "no")


if __name__ == "__main__":
    verb.run(main)
