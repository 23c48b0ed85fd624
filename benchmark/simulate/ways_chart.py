"""Draw the routes of a router side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws files, without a display

from matplotlib import pyplot as plt

STYLE = {"axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "font.size": 8}
PANELS = (
    ("prefix_hit_rate", "prompt tokens found", "{:.2f}"),
    ("routed_most_of_mean", "most loaded engine / mean", "{:.2f}"),
    ("ttft_ms.p50", "TTFT p50, ms", "{:,.0f}"),
    ("ttft_ms.p99", "TTFT p99, ms", "{:,.0f}"),
)


def save(path: Path, ways: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a bar for each route."""
    names = [*ways]
    with mpl.rc_context(STYLE):
        figure, all_axes = plt.subplots(1, len(PANELS), figsize=(10, 0.9 + 0.3 * len(names)), sharey=True)
        for axes, (name, heading, form) in zip(all_axes, PANELS):
            first, _, rest = name.partition(".")
            values = [ways[each][first][rest] if rest else ways[each][first] for each in names]
            shown = axes.barh(names, values, color="#35608d", height=0.65)
            axes.bar_label(shown, [form.format(value) for value in values], padding=2, fontsize=7)
            axes.set_title(heading)
            axes.margins(x=0.25)
            axes.grid(axis="y", visible=False)
        all_axes[0].invert_yaxis()
        figure.suptitle("SIMULATED", x=0.01, ha="left", fontsize=7)
        figure.tight_layout()
        figure.savefig(path, dpi=100, metadata={"Software": None} if path.suffix == ".png" else None)
        plt.close(figure)
