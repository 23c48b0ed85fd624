#!/usr/bin/env bash
# Serves a recipe over HTTP, by OpenAI's API; installs what that needs first.
#
#   bash scripts/serve.sh RECIPE.yaml [key=value ...] [--host 127.0.0.1] [--port 8000]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh serve
exec bash scripts/launch.sh serve "$@"
