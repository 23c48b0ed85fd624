"""Render the server's metrics in Prometheus's text format for /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from borders.version import VERSION
from serving.metrics.dashboard_names import VLLM, cache_config
from serving.metrics.prometheus_names import OURS, Value
from serving.metrics.prometheus_names import Metric as Ours
from serving.metrics.server_stats import Histogram, ServerStats

__all__ = ["CONTENT_TYPE", "NAMESPACE", "Exposition"]
NAMESPACE = "cb_"
_FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class Exposition(Collector):
    """The server's metrics in a Prometheus registry of their own, collected anew for every scrape.

    `engine_pid` returns the id of the engine's process, if there is one; its memory is measured as well as
    ours.
    """

    def __init__(self, stats: ServerStats, model: str, engine_pid: Callable[[], int | None]) -> None:
        self._stats = stats
        self._labels = {"model_name": model, "engine": "0"}
        self._reading: list[tuple[str, Ours, Value]] = []
        self.read()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        ProcessCollector(f"{NAMESPACE}engine", lambda: engine_pid() or "none", registry=self._registry)

    def read(self) -> None:
        """Copy the numbers in the event loop, where they do not change meanwhile; this takes little time."""
        self._reading = [
            (prefix + each.name, each, _copy(each.read(self._stats)))
            for prefix, metrics in ((NAMESPACE, OURS), ("vllm:", VLLM))
            for each in metrics
        ]
        self._config = self._labels | cache_config(self._stats)

    def text(self) -> bytes:
        """Return the last copy in the format of CONTENT_TYPE; takes milliseconds, in any thread."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the last copy."""
        for name, metric, value in self._reading:
            yield self._family(name, metric, value)
        info = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the cache", labels=list(self._config))
        info.add_metric(list(self._config.values()), 1)
        yield info
        labels = self._labels | {"version": VERSION}
        build = GaugeMetricFamily(f"{NAMESPACE}build_info", "The version of this server", labels=list(labels))
        build.add_metric(list(labels.values()), 1)
        yield build

    def _family(self, name: str, metric: Ours, found: Value) -> Metric:
        names, values = list(self._labels), list(self._labels.values())
        if isinstance(found, Histogram):
            histogram = HistogramMetricFamily(name, metric.help, labels=names)
            histogram.add_metric(values, found.buckets(metric.scale), found.sum * metric.scale)
            return histogram
        kind = _FAMILIES[metric.kind]
        if not isinstance(found, Mapping):
            family = kind(name, metric.help, labels=names)
            family.add_metric(values, float(found))
            return family
        family = kind(name, metric.help, labels=[*names, metric.label])
        for label, value in found.items():
            family.add_metric([*values, label], float(value))
        return family


def _copy(value: Value) -> Value:
    if isinstance(value, Histogram):
        return value.copy()
    return dict(value) if isinstance(value, Mapping) else value
