"""Connects what holds settings with the one place that replaces them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from router.config import Config
from router.metrics import Metrics
from router.metrics_config import ConfigCollector, ConfigFigures
from router.runtime.live_config import LiveConfig


class Holder(Protocol):
    """Whatever goes by settings."""

    def on_config(self, config: Config) -> None:
        """Go by these from now on."""


def connect(live: LiveConfig, metrics: Metrics, holders: Iterable[Holder]) -> None:
    """Let `holders` follow `live`, in their order, and show its state among `metrics`."""
    live.on_config += [holder.on_config for holder in holders]
    live.on_config.append(_set_log_level)
    metrics.registry.register(ConfigCollector(partial(_figures, live)))


def _set_log_level(config: Config) -> None:
    logging.getLogger("router").setLevel(config.server.log_level.upper())


def _figures(live: LiveConfig) -> ConfigFigures:
    return ConfigFigures(live.version, live.counts, bool(live.file_faults), len(live.waiting))
