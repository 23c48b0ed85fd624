"""Draw the gain of each kind of speculation over the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws files, without a display

from matplotlib import pyplot as plt


def save(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw one field for each text: gain over plain decoding by requests at once, one line for each kind."""
    texts = list(dict.fromkeys(row["text"] for row in rows))
    figure, fields = plt.subplots(1, len(texts), sharey=True, figsize=(4.2 * len(texts), 4), squeeze=False)
    for axes, text in zip(fields[0], texts):
        of_text = [row for row in rows if row["text"] == text]
        for kind in dict.fromkeys(row["kind"] for row in of_text):
            points = [(row["slots"], row["times_plain"]) for row in of_text if row["kind"] == kind]
            axes.plot(*zip(*points), marker="o", label=kind)
        axes.axhline(0.98, color="grey", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_title(f"{text} text", loc="left")
        axes.set_xlabel("requests at once")
    fields[0, 0].set_ylabel("tokens a second, times plain")
    fields[0, -1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
