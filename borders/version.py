"""The version of this project, which `--version`, `/version`, the metrics and CHANGELOG.md show."""

VERSION = "0.3.0"
