"""Where this router keeps its limits: in its Redis, or without one in itself."""

from __future__ import annotations

import asyncio

from router.config import Config
from router.metrics import Metrics
from router.metrics_limits import LimitsCollector
from router.runtime.bucket_store import BucketStore
from router.runtime.local_buckets import LocalBuckets
from router.runtime.redis_buckets import RedisBuckets
from router.runtime.redis_link import RedisLink


def limits_of(config: Config, link: RedisLink | None, metrics: Metrics) -> BucketStore:
    """The store of limits, its series among `metrics`. Start it before requests come."""
    store: BucketStore
    if link is None:
        store = LocalBuckets()
    else:
        store = RedisBuckets(link, config.limits, loop=asyncio.get_running_loop())
    metrics.registry.register(LimitsCollector(store.view))
    return store
