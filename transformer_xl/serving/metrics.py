"""What `/metrics` shows, in the form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .service import Service


class _Engine:
    """Reads the figures of a service when they are asked for."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        engine, sessions = self.service.engine, self.service.sessions
        for name, about, value in (
            ("txl_tokens_read", "Tokens of prompts that were read.", engine.counts.read),
            ("txl_tokens_written", "Tokens that were written.", engine.counts.written),
            ("txl_steps", "Steps, each of one token in every busy row.", engine.counts.steps),
            ("txl_step_seconds", "Time spent on steps.", engine.counts.seconds),
        ):
            yield CounterMetricFamily(name, about, value=value)
        for name, about, value in (
            ("txl_rows", "Texts that can be written at the same time.", engine.rows),
            ("txl_busy", "Prompts being read and texts being written.", engine.busy),
            ("txl_waiting", "Prompts in the queue.", engine.waiting),
            ("txl_sessions", "Texts that can be continued.", len(sessions)),
            ("txl_session_bytes", "Their size.", sessions.nbytes),
        ):
            yield GaugeMetricFamily(name, about, value=value)


class ServerMetrics:
    """The counters of one server."""

    def __init__(self, service: Service) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(_Engine(service))
        self.requests: Counter = Counter(
            "txl_requests", "Answered requests.", ["route", "status"], registry=self.registry
        )
        self.first_token: Histogram = Histogram(
            "txl_first_token_seconds", "Time to the first piece of an answer.", registry=self.registry
        )

    def count(self, route: str, status: int) -> None:
        """Count an answer."""
        self.requests.labels(route, str(status)).inc()
