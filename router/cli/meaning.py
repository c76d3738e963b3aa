"""Says in a few lines what a configuration means, for `laneway check-config`."""

from __future__ import annotations

from collections.abc import Iterator

from router.cli.meaning_limits import limits_meaning, tenants_meaning
from router.config import TTL_MORE_S, Config
from router.contract import Lane, WorkerSpec
from router.redis_settings import RedisSettings


def meaning(config: Config) -> Iterator[str]:
    """Lines for people: who may call, where it listens, which workers, how it decides."""
    server, queue, retry = config.server, config.queue, config.retry
    scheme = "https" if server.tls.cert_path else "http"
    yield f"listens on  {scheme}://{_bracketed(server.host)}:{server.port}"
    keys = len(config.auth.api_keys) + sum(len(t.keys) for t in config.tenants.values())
    yield f"clients     {_who(keys, 'may call without a key')}"
    yield f"admin       {_who(len(config.auth.admin_keys), 'no key, from this machine only')}"
    yield f"workers     {len(config.workers) or 'none from the start'}"
    yield from (f"  {_worker(worker)}" for worker in config.workers)
    lanes = config.lanes
    spill = "with spill-over" if lanes.spill else "without spill-over"
    yield f"lanes       short up to {lanes.short_tokens_max} output tokens, long above, {spill}"
    yield f"policy      {config.policy.name}"
    yield (
        f"queue       {queue.depth_max} requests per lane, {queue.wait_s_max:g} s each"
        f"{_late(config)}, then 429 with Retry-After"
    )
    classes = config.classes
    yield f"classes     {classes.default} unless claimed, up to {classes.ceiling}"
    yield from tenants_meaning(config)
    yield from limits_meaning(config)
    yield f"redis       {_redis(config.redis)}"
    yield f"processes   {_processes(config.relays.count)}"
    yield f"KV memory   {_kv_memory(config)}"
    yield f"retries     {retry.retries_max} before the first byte, each on another worker"
    yield f"bodies      up to {server.body_bytes_max / 2**20:g} MiB"
    if config.models:
        yield f"models      {', '.join(config.models)}"
    yield (
        f"shutdown    {server.drain_delay_s:g} s not ready but serving, "
        f"then up to {server.shutdown_grace_s:g} s for running answers"
    )


def _kv_memory(config: Config) -> str:
    headroom = config.headroom
    most = f"at most {headroom.kv_ratio_max:.0%} of a worker's pool"
    margin = f"; {headroom.kv_margin_mb:g} MiB stay free, or a quarter if that is less"
    return most + margin if headroom.kv_margin_mb else most


def _redis(settings: RedisSettings) -> str:
    match settings.mode:
        case "none":
            return "none: limits and workers are this router's alone"
        case "embedded":
            return "embedded: limits outlive no restart and are this router's alone"
        case mode:
            # A URL may carry a password.
            where = ", ".join(url.rpartition("@")[2].rpartition("/")[2] for url in settings.urls)
            return f"{mode} at {where}: limits, workers and patches are shared"


def _processes(relays: int) -> str:
    return f"{relays} relays and one that decides for them" if relays else "one"


def _who(keys: int, otherwise: str) -> str:
    return f"{keys} key{'s' if keys > 1 else ''}" if keys else otherwise


def _worker(worker: WorkerSpec) -> str:
    lanes = " and ".join(lane.value for lane in Lane if lane in worker.lanes)
    models = ", ".join(worker.models) or "models as it says"
    return f"{worker.worker_id}  {worker.url}  {lanes}  {models}"


def _late(config: Config) -> str:
    """How long the late requests of those classes wait that are given up sooner."""
    classes = config.classes.by_priority
    waits_s = [
        targets * settings.ttft_target_s + TTL_MORE_S
        for settings, targets in zip(classes, config.ttl_targets, strict=True)
    ]
    sooner = [
        f"P{priority} {wait_s:g} s"
        for priority, wait_s in enumerate(waits_s)
        if wait_s < config.waits_s_max[priority]
    ]
    return f" (late {', '.join(sooner)})" if sooner else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
