"""Write a summary line to the log every few seconds, while there is work."""

from __future__ import annotations

import asyncio
import logging
import time

from serving.metrics.server_stats import ServerStats

log = logging.getLogger(__name__)


class Pulse:
    """Logs the differences of the server's counts since the last line."""

    def __init__(self, stats: ServerStats) -> None:
        self._stats = stats
        self._last = self._sums()
        self._last_s = time.monotonic()

    def _sums(self) -> tuple[int, int, int, int]:
        stats, counters = self._stats, self._stats.counters
        return stats.answer_tokens, stats.prefill_tokens, counters["hit_tokens"], counters["prompt_tokens"]

    def beat(self) -> None:
        """Log a line, if there is work or was some since the last line."""
        last, self._last = self._last, self._sums()
        last_s, self._last_s = self._last_s, time.monotonic()
        answered, computed, hit, asked = (now - before for now, before in zip(self._last, last))
        if not (answered or computed or self._stats.num_open):
            return
        gauges, took_s = self._stats.gauges, max(1e-9, self._last_s - last_s)
        fields = {
            "running": gauges.running_requests,
            "waiting": gauges.waiting_requests,
            "pages_used": gauges.held_pages,
            "pages": gauges.held_pages + gauges.idle_pages + gauges.free_pages,
            "hit_rate": round(hit / asked, 3) if asked else None,
            "answer_tokens_per_s": round(answered / took_s, 1),
            "prompt_tokens_per_s": round(computed / took_s, 1),
        }
        log.info(
            "running %d, waiting %d, pages %d of %d, found cached %s, tokens/s %.1f out, %.1f of prompts",
            fields["running"],
            fields["waiting"],
            fields["pages_used"],
            fields["pages"],
            "-" if not asked else f"{hit / asked:.0%}",
            answered / took_s,
            computed / took_s,
            extra={"fields": fields},
        )


async def report(stats: ServerStats, every_s: float) -> None:
    """Log a line at this interval, for ever."""
    pulse = Pulse(stats)
    while True:
        await asyncio.sleep(every_s)
        pulse.beat()
