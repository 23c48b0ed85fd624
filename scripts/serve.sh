#!/usr/bin/env bash
# Serves a recipe, or a checkpoint's folder, over HTTP, by OpenAI's API; installs what that needs first.
#
#   bash scripts/serve.sh RECIPE.yaml [key=value ...] [--host 127.0.0.1] [--port 8000]
#   bash scripts/serve.sh DIR [key=value ...]     a checkpoint's folder: the recipe that fits it is chosen
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh serve
exec bash scripts/launch.sh serve "$@"
