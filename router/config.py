"""Every setting of the router: default, range, unit and reason, in one place.

`Config` is read by `config_source`: YAML, then environment variables (`LANEWAY_SERVER__PORT=8080`),
then flags; the later wins. A faulty configuration is refused whole, with every fault listed under
its path. Settings are frozen: a change replaces the object, nothing edits it. Layer 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    SettingsConfigDict,
)

from router.auth_settings import AuthSettings
from router.cluster_settings import ClusterSettings
from router.contract import Lane, WorkerSpec
from router.limit_settings import LimitsSettings
from router.model_settings import ModelSettings, kv_bytes_by_name
from router.qos_settings import (
    ClassesSettings,
    DegradeSettings,
    DrainSettings,
    PacingSettings,
    PreemptSettings,
    QueueSettings,
    SloSettings,
)
from router.redis_settings import RedisSettings
from router.relay_settings import RelaySettings
from router.strict import Strict as _Section
from router.strict import in_plain_words
from router.tenant_settings import (
    ANONYMOUS,
    TenantName,
    TenantSettings,
    digest_of,
    name_of,
    repeated_keys,
)

PolicyName = Literal[
    "least_work", "weighted", "round_robin", "random", "least_in_flight", "power_of_two"
]
TTL_MORE_S: Final = 2.0  # what late requests wait beside their targets, of which some are short


class BadConfig(Exception):
    """A configuration that cannot be used. `faults` holds one line each, path first."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class TlsSettings(_Section):
    """Certificates of the listening side."""

    cert_path: Path | None = Field(None, description="Server certificate (PEM); needs key_path.")
    key_path: Path | None = Field(None, description="Its private key (PEM).")
    client_ca_path: Path | None = Field(
        None, description="Clients must show a certificate signed by this CA."
    )

    @model_validator(mode="after")
    def _complete(self) -> TlsSettings:
        if (self.cert_path is None) != (self.key_path is None):
            raise ValueError("cert_path and key_path go together")
        if self.client_ca_path is not None and self.cert_path is None:
            raise ValueError(
                "client_ca_path needs cert_path and key_path: without, it is not HTTPS"
            )
        return self


class ServerSettings(_Section):
    """The listening side."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(30_000, ge=0, le=65_535, description="TCP port; 0 picks a free one.")
    body_bytes_max: int = Field(
        32 * 2**20, ge=1024, le=2**31, description="Largest request body; above it 413."
    )
    bodies_bytes_max: int = Field(
        2**30,
        ge=1024,
        le=2**42,
        description="Bodies held at once, until their answers begin; above it 503.",
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds for a client to deliver head and body, else 408."
    )
    keep_alive_s: float = Field(
        75.0, gt=0, le=3600, description="Seconds an idle client connection is kept."
    )
    connections_max: int = Field(
        20_000, ge=1, le=1_000_000, description="Client connections at once; more get 503."
    )
    client_buffer_bytes_max: int = Field(
        16 * 2**10,
        ge=4096,
        le=2**26,
        description="With more waiting for a client that reads too slowly, its worker is read no "
        "further. Two reads of about 50 kB may be held besides.",
    )
    drain_delay_s: float = Field(
        2.0, ge=0, le=600, description="After SIGTERM: seconds not ready but still accepting."
    )
    shutdown_grace_s: float = Field(
        180.0, ge=0, le=86_400, description="Then: seconds for running answers to end."
    )
    access_log: bool = Field(True, description="One line per finished request on standard output.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of the router's own log, on standard error."
    )
    request_id_headers: tuple[str, ...] = Field(
        ("x-request-id", "x-correlation-id"),
        max_length=8,
        description="Headers whose value becomes the request id; first found wins.",
    )
    cors_allowed_origins: tuple[str, ...] = Field(
        (), max_length=64, description="Browser origins that may call; '*' for any."
    )
    tls: TlsSettings = Field(TlsSettings(), description="HTTPS instead of HTTP when set.")

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_lower_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_body_fits(self) -> ServerSettings:
        if self.bodies_bytes_max < self.body_bytes_max:
            raise ValueError("bodies_bytes_max is less than one body may have (body_bytes_max)")
        return self


class ProbeSettings(_Section):
    """How workers are polled for their load."""

    interval_s: float = Field(1.0, ge=0.05, le=60, description="Seconds between polls of a worker.")
    jitter_ratio: float = Field(
        0.1, ge=0, le=0.5, description="Each interval is varied by up to this share."
    )
    timeout_s: float = Field(2.0, gt=0, le=60, description="Deadline of one poll, in seconds.")
    concurrency_max: int = Field(64, ge=1, le=10_000, description="Polls at once.")
    stale_after_s: float = Field(
        3.0, gt=0, le=600, description="A report older than this makes its figures unknown."
    )
    failures_to_eject: int = Field(
        3, ge=1, le=100, description="Failed liveness polls in a row that eject a worker."
    )
    join_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="Seconds until a joining worker is shown as failed."
    )


class LaneSettings(_Section):
    """Short and long lanes."""

    short_tokens_max: int = Field(
        256, ge=1, le=1_000_000, description="max_tokens up to this goes to the short lane."
    )
    output_quantile: float = Field(
        0.9,
        ge=0.5,
        le=0.999,
        description="Without max_tokens: this quantile of the model's output lengths decides.",
    )
    spill: bool = Field(
        True, description="A lane may use the other's workers when that is safe and faster."
    )
    spill_wait_s: float = Field(
        0.25, gt=0, le=60, description="Predicted first-token seconds above which short spills."
    )
    short_concurrency_max: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Requests of the short lane that one router has running at once, on all "
        "workers together; more wait. Empty: no limit.",
    )
    long_concurrency_max: int | None = Field(
        None, ge=1, le=1_000_000, description="The same for the long lane."
    )

    @property
    def permits(self) -> dict[Lane, int]:
        """How many requests of a lane may run at once; lanes without a limit are not there."""
        limits = {Lane.SHORT: self.short_concurrency_max, Lane.LONG: self.long_concurrency_max}
        return {lane: limit for lane, limit in limits.items() if limit is not None}


class PolicySettings(_Section):
    """Choosing the worker."""

    name: PolicyName = Field("least_work", description="How a worker is chosen.")
    shadow: PolicyName | None = Field(
        None, description="A second policy, asked about each dispatch without effect: GET /shadow."
    )
    weight_kv_free: float = Field(0.5, ge=0, le=1, description="`weighted`: free KV memory.")
    weight_queue: float = Field(0.3, ge=0, le=1, description="`weighted`: short queue.")
    weight_latency: float = Field(0.2, ge=0, le=1, description="`weighted`: low latency.")
    report_weight: float = Field(
        0.3, ge=0, le=1, description="Share of the gap to a report that one poll corrects."
    )
    slow_start_s: float = Field(
        10.0, ge=0, le=600, description="Seconds over which a new worker reaches its full share."
    )
    seed: int | None = Field(None, description="Seed of random choices; empty: from the system.")


class HeadroomSettings(_Section):
    """KV memory is never overfilled by what this router sends."""

    kv_ratio_max: float = Field(
        0.92, gt=0, le=1, description="Share of the KV pool that may be used and reserved."
    )
    kv_margin_mb: float = Field(
        512.0,
        ge=0,
        le=1_000_000,
        description="MiB of the KV pool that stay free, or a quarter of it if that is less; no "
        "margin where the size of a token is unknown.",
    )
    output_reserve_tokens: int = Field(
        256, ge=0, le=1_000_000, description="Output tokens reserved at first; grows as it runs."
    )
    concurrency_default: int = Field(
        256, ge=1, le=100_000, description="Requests at once on a worker that names no limit."
    )
    queued_requests_max: int = Field(
        64, ge=0, le=100_000, description="A worker reporting more waiting than this is left out."
    )


class BreakerSettings(_Section):
    """Takes a failing worker out; lets one request through to see whether it is well again."""

    failures: int = Field(5, ge=1, le=1000, description="Failures in a row that open it.")
    open_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds until a trial, and between trials that run."
    )
    successes: int = Field(1, ge=1, le=100, description="Good trials in a row that close it.")


class RetrySettings(_Section):
    """Second tries, only before the first byte went to the client."""

    retries_max: int = Field(
        2, ge=0, le=10, description="Further attempts, each on another worker."
    )
    budget_ratio: float = Field(
        0.1, ge=0, le=1, description="Retries earned per finished request, over all requests."
    )
    budget_tokens_max: float = Field(
        10.0, ge=0, le=1000, description="Retries that can be saved up; the budget starts full."
    )
    backoff_s: float = Field(0.05, ge=0, le=60, description="Mean pause before the first retry.")
    backoff_factor: float = Field(2.0, ge=1, le=10, description="Growth of the pause.")
    backoff_s_max: float = Field(2.0, ge=0, le=600, description="Longest pause, in seconds.")


class UpstreamSettings(_Section):
    """Connections to workers."""

    connections_max: int = Field(
        1_024, ge=1, le=65_535, description="Connections to one worker; more wait in the queue."
    )
    idle_s: float = Field(
        4.0, gt=0, le=3600, description="Idle connections are closed after this; SGLang's is 5 s."
    )
    connect_timeout_s: float = Field(2.0, gt=0, le=60, description="Deadline to connect.")
    first_byte_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="Longest wait for the first byte of an answer."
    )
    idle_chunk_timeout_s: float = Field(
        120.0, gt=0, le=86_400, description="Longest silence inside an answer that has begun."
    )
    ca_path: Path | None = Field(None, description="CA of workers' certificates (PEM).")
    cert_path: Path | None = Field(
        None, description="Client certificate shown to workers (PEM); needs key_path."
    )
    key_path: Path | None = Field(None, description="Its private key (PEM).")

    @model_validator(mode="after")
    def _complete(self) -> UpstreamSettings:
        if (self.cert_path is None) != (self.key_path is None):
            raise ValueError("cert_path and key_path go together")
        return self


class PrefixSettings(_Section):
    """Which worker has seen the beginning of a prompt."""

    enabled: bool = Field(True, description="Count a cached prefix as prefill that need not run.")
    blocks_max: int = Field(
        128,
        ge=1,
        le=4096,
        description="Blocks of a prompt that are told apart: 64 of 512 bytes, then of 8,192 each. "
        "128 are 544 kB.",
    )
    worker_blocks_max: int = Field(
        20_000,
        ge=0,
        le=10_000_000,
        description="512-byte blocks of prompts remembered per worker at most; as many as its "
        "memory holds if it says. A block of 8,192 bytes counts as 16.",
    )
    wait_ratio: float = Field(
        8.0,
        ge=0,
        le=1000,
        description="Seconds that a prompt waits longer for a worker that has more of it cached, "
        "for each second of prefill that is spared; not so long that it would be late.",
    )


class LiveSettings(_Section):
    """Changes of this configuration while the router runs."""

    poll_s: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Seconds between looks at the file; 0: it is read again only at SIGHUP.",
    )
    history_max: int = Field(
        50, ge=1, le=1000, description="Versions that are remembered and can be brought back."
    )


class CatalogSettings(_Section):
    """Names of models."""

    unknown: Literal["refuse", "any"] = Field(
        "refuse", description="A model no worker serves: 404, or any worker may answer."
    )


class Config(BaseSettings):
    """The whole configuration. Read it with `config_source.load_config`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix="LANEWAY_",
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    server: ServerSettings = ServerSettings()
    relays: RelaySettings = RelaySettings()
    auth: AuthSettings = AuthSettings()
    workers: tuple[WorkerSpec, ...] = Field((), description="Workers known from the start.")
    cluster: ClusterSettings = ClusterSettings()
    probe: ProbeSettings = ProbeSettings()
    lanes: LaneSettings = LaneSettings()
    policy: PolicySettings = PolicySettings()
    headroom: HeadroomSettings = HeadroomSettings()
    queue: QueueSettings = QueueSettings()
    classes: ClassesSettings = ClassesSettings()
    tenants: dict[TenantName, TenantSettings] = Field(
        default_factory=dict,
        max_length=10_000,
        description="Settings by tenant. A key of auth.api_keys is tenant key- and the first 8 hex "
        "digits of its SHA-256; who shows none is tenant anonymous.",
    )
    limits: LimitsSettings = LimitsSettings()
    redis: RedisSettings = RedisSettings()
    pacing: PacingSettings = PacingSettings()
    slo: SloSettings = SloSettings()
    degrade: DegradeSettings = DegradeSettings()
    drain: DrainSettings = DrainSettings()
    preempt: PreemptSettings = PreemptSettings()
    breaker: BreakerSettings = BreakerSettings()
    retry: RetrySettings = RetrySettings()
    upstream: UpstreamSettings = UpstreamSettings()
    prefix: PrefixSettings = PrefixSettings()
    catalog: CatalogSettings = CatalogSettings()
    live: LiveSettings = LiveSettings()
    models: dict[Annotated[str, Field(min_length=1, max_length=512)], ModelSettings] = Field(
        default_factory=dict, max_length=1000, description="Settings by model name."
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Config:
        ids = repeated(worker.worker_id for worker in self.workers)
        urls = repeated(worker.url for worker in self.workers)
        names = repeated(n for m, s in self.models.items() for n in (m, *s.aliases))
        faults = [f"workers: the id {worker_id} appears twice" for worker_id in ids]
        faults += [f"workers: {url} appears twice" for url in urls]
        faults += [f"models: the name {name!r} appears twice" for name in names]
        faults += repeated_keys(self.auth, self.tenants)
        faults += [
            f"limits.models: {' and '.join(limited)} are one model"
            for model, settings in self.models.items()
            if len(limited := [n for n in (model, *settings.aliases) if n in self.limits.models])
            > 1
        ]
        faults += [
            f"models: {model} falls back to itself"
            for model, settings in self.models.items()
            if settings.fallback in (model, *settings.aliases)
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @cached_property
    def tenant_names(self) -> frozenset[str]:
        """Every tenant that this configuration knows, those that are only a key included."""
        keys = (digest_of(key.get_secret_value()) for key in self.auth.api_keys)
        return frozenset((ANONYMOUS, *self.tenants, *map(name_of, keys)))

    @cached_property
    def kv_bytes_per_token(self) -> dict[str, float]:
        """KV memory of a token in bytes, by every name of the models whose settings say it."""
        return kv_bytes_by_name(self.models)

    @property
    def has_user_keys(self) -> bool:
        """Whether callers need a key: without any, everybody may call."""
        return bool(self.auth.api_keys) or any(t.keys for t in self.tenants.values())

    @property
    def waits_s_max(self) -> tuple[float, ...]:
        """The longest wait of each class, most urgent first, in seconds."""
        return tuple(c.wait_s_max or self.queue.wait_s_max for c in self.classes.by_priority)

    @property
    def ttl_targets(self) -> tuple[float, ...]:
        """After how many TTFT targets a late request of each class is given up; inf: never."""
        queue = self.queue
        relegates = queue.order == "fair" and queue.relegate_ratio > 0
        targets = (queue.give_up_after_targets if relegates else 0.0) or inf
        return tuple(inf if c.wait_s_max else targets for c in self.classes.by_priority)

    @cached_property
    def tpot_targets_s(self) -> tuple[float, ...]:
        """The target of each class for the time per token, most urgent first, in seconds."""
        return tuple(c.tpot_target_s for c in self.classes.by_priority)

    @cached_property
    def by_tpot_target(self) -> tuple[tuple[int, float], ...]:
        """The classes with these targets, the tightest first."""
        return tuple(sorted(enumerate(self.tpot_targets_s), key=itemgetter(1)))


def repeated(items: Iterable[str]) -> list[str]:
    """The items that come more than once, each once, in their order."""
    return [item for item, count in Counter(items).items() if count > 1]


def faults_of(exc: ValidationError) -> Iterator[str]:
    """One line for each fault, its path first; values are never repeated."""
    for error in exc.errors(include_url=False, include_input=False):
        path = ".".join(str(part) for part in error["loc"]) or "config"
        yield f"{path}: {in_plain_words(error)}"
