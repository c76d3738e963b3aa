"""Settings of quality of service: classes, pacing, and the policies that watch and react.

A part of `router.config`, which holds all other sections. Layer 0.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from router.strict import Strict

PriorityName = Literal["P0", "P1", "P2", "P3"]


class Section(Strict):
    """A group of settings."""


class QueueSettings(Section):
    """Requests wait here until a worker can really take them."""

    depth_max: int = Field(
        1_000, ge=0, le=100_000, description="Requests waiting per lane before queue_full."
    )
    wait_s_max: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Wait before queue_timeout of classes that set none of their own, in seconds.",
    )
    order: Literal["fair", "dynamic", "fifo"] = Field(
        "fair",
        description="fair: bands with minimum shares, fair between tenants; dynamic: by tier, "
        "urgency and waiting time; fifo: by arrival.",
    )
    relegate_ratio: float = Field(
        0.95,
        ge=0,
        le=10,
        description="At this share of its TTFT target a waiting request yields to those that can "
        "still be in time; 0: never.",
    )
    give_up_after_targets: float = Field(
        4.0,
        ge=0,
        le=1000,
        description="A late request is refused with queue_timeout once it has waited this many of "
        "its TTFT targets and 2 s, unless its class sets wait_s_max; 0: when its wait is over.",
    )
    promote_after_targets: float = Field(
        10.0,
        ge=0,
        le=1000,
        description="A request that is not late moves up a band, at most to P1, each time it has "
        "waited this many TTFT targets; 0: never.",
    )
    lookahead_max: int = Field(
        16, ge=1, le=1000, description="Waiting requests that are tried when the first do not fit."
    )
    skips_max: int = Field(
        64,
        ge=0,
        le=100_000,
        description="A request that does not fit is passed by others this often, then they wait "
        "for it.",
    )


class ClassSettings(Section):
    """One priority class."""

    ttft_target_s: float = Field(
        gt=0, le=86_400, description="Target for the time to the first token, in seconds."
    )
    tpot_target_s: float = Field(
        gt=0, le=600, description="Target for the mean time per further token, in seconds."
    )
    share_min: float = Field(
        ge=0, le=1, description="Share of the dispatched cost that it gets at least while it waits."
    )
    wait_s_max: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Wait before queue_timeout; empty: queue.wait_s_max, or what "
        "queue.give_up_after_targets allows a late request.",
    )
    cost_weight: float = Field(
        1.0, gt=0, le=1e4, description="What its requests cost, in limits, beside other classes'."
    )


class ClassesSettings(Section):
    """The priority classes: P0 real-time, P1 normal, P2 batch and free, P3 offline."""

    p0: ClassSettings = Field(
        ClassSettings(ttft_target_s=0.1, tpot_target_s=0.05, share_min=0.6),
        description="Real-time.",
    )
    p1: ClassSettings = Field(
        ClassSettings(ttft_target_s=0.5, tpot_target_s=0.075, share_min=0.3),
        description="Normal, paid.",
    )
    p2: ClassSettings = Field(
        ClassSettings(ttft_target_s=2.0, tpot_target_s=0.15, share_min=0.08),
        description="Batch, free.",
    )
    p3: ClassSettings = Field(
        ClassSettings(ttft_target_s=30.0, tpot_target_s=1.0, share_min=0.02, wait_s_max=600.0),
        description="Offline.",
    )
    default: PriorityName = Field("P1", description="Class of a request that names none.")
    ceiling: PriorityName = Field(
        "P0", description="The most urgent class that a request may claim; a claim above is cut."
    )

    @model_validator(mode="after")
    def _default_may_be_had(self) -> ClassesSettings:
        if self.default < self.ceiling:
            raise ValueError(f"default {self.default} is above the ceiling {self.ceiling}")
        return self

    @model_validator(mode="after")
    def _shares_fit(self) -> ClassesSettings:
        total = sum(c.share_min for c in self.by_priority)
        if total > 1 + 1e-9:
            raise ValueError(f"the minimum shares add up to {total:.0%}, more than there is")
        return self

    @property
    def by_priority(self) -> tuple[ClassSettings, ClassSettings, ClassSettings, ClassSettings]:
        """The classes, most urgent first."""
        return self.p0, self.p1, self.p2, self.p3


class PacingSettings(Section):
    """How fast prompts are sent to a worker, so that its running streams keep their pace."""

    enabled: bool = Field(
        True,
        description="An engine prefills before it decodes: unpaced, a burst of prompts stops every "
        "running stream.",
    )
    prefill_ahead_s: float = Field(
        0.08,
        gt=0,
        le=60,
        description="Predicted prefill that may wait in a worker; more is held in the router.",
    )
    prefill_ahead_urgent_s: float = Field(
        0.12, gt=0, le=60, description="The same for P0, which so finds a place behind few others."
    )
    tpot_ratio: float = Field(
        0.9,
        gt=0,
        le=2,
        description="Pacing aims at this share of the tightest TPOT target of the classes that a "
        "worker runs.",
    )
    duty_min: float = Field(
        0.25, gt=0, le=1, description="Least share of a worker's time for prefill."
    )
    duty_max: float = Field(
        0.9, gt=0, le=1, description="Greatest share of a worker's time for prefill."
    )
    credit_s_max: float = Field(
        0.15, gt=0, le=60, description="Prefill time that can be saved up while none is sent."
    )
    credit_kept_s: float = Field(
        0.03, ge=0, le=60, description="Saved prefill time that only P0 may use."
    )
    credit_batch_s: float = Field(
        0.1,
        ge=0,
        le=60,
        description="Prefill time saved on top of that, once it is used up, before others than P0 "
        "get more: several prompts at once cost an engine less than one by one.",
    )
    credit_kept_late_s: float = Field(
        0.1, ge=0, le=60, description="Saved prefill time that late requests leave to the others."
    )
    debt_s_max: float = Field(
        1.0, ge=0, le=600, description="Prefill time that a long prompt may owe afterwards at most."
    )
    overdraft_s: float = Field(
        0.05, ge=0, le=60, description="Prefill time that P0 may use before it is there."
    )
    elephant_s: float = Field(
        0.15,
        gt=0,
        le=600,
        description="A prompt that takes longer to prefill is an elephant: few workers take one "
        "at a time.",
    )
    elephant_headroom: float = Field(
        2.2,
        ge=0,
        le=100,
        description="Workers that elephants leave to the others: so many times what those need.",
    )
    streams_free: int = Field(
        8, ge=0, le=10_000, description="Up to this many running streams a worker is not paced."
    )

    @property
    def credit_resume_s(self) -> float:
        """The credit above which a worker that had used it up takes prompts again."""
        return self.credit_kept_s + self.credit_batch_s

    @model_validator(mode="after")
    def _credit_can_be_had(self) -> PacingSettings:
        for names, credit_s in (
            ("credit_kept_s and credit_batch_s are", self.credit_resume_s),
            ("credit_kept_late_s is", self.credit_kept_late_s),
        ):
            if credit_s >= self.credit_s_max:
                raise ValueError(
                    f"{names} {credit_s:g} s, which credit_s_max = {self.credit_s_max:g} never "
                    "exceeds: nothing would be sent"
                )
        return self


class SloSettings(Section):
    """Whether classes meet their targets, and the slow loop that moves shares between them."""

    loop: Literal["adjust", "observe", "off"] = Field(
        "adjust",
        description="adjust: shares follow attainment; observe: moves are only recorded; off.",
    )
    window_requests: int = Field(
        1_000, ge=50, le=100_000, description="Last requests of a class that attainment looks at."
    )
    target: float = Field(
        0.99, gt=0.5, lt=1, description="Share of a class's requests that should meet its targets."
    )
    floor: float = Field(
        0.95, gt=0, lt=1, description="Attainment below this is an alarm, not only a shortfall."
    )
    feasible_ratio: float = Field(
        0.8,
        gt=0,
        le=1,
        description="A request whose prefill alone takes more than this share of its TTFT target "
        "is infeasible: it is counted, but no loop chases it.",
    )
    interval_s: float = Field(5.0, ge=1, le=600, description="Seconds between looks of the loop.")
    cool_down_s: float = Field(
        5.0, ge=0, le=600, description="Seconds after a move until the next one."
    )
    window_s: float = Field(
        30.0,
        ge=5,
        le=3600,
        description="Seconds that the loop looks back at least, and that a move stands before "
        "another may go against it: no more than two changes of direction a minute at 30.",
    )
    window_s_max: float = Field(
        300.0, ge=5, le=86_400, description="Seconds that it looks back at most, for few requests."
    )
    samples: int = Field(
        200, ge=1, le=100_000, description="Requests that it looks back for, beyond window_s."
    )
    samples_min: int = Field(
        30, ge=1, le=100_000, description="With fewer requests a class neither gets nor gives."
    )
    dead_band: float = Field(
        0.01, ge=0, le=0.5, description="Shortfall that is left alone; never under the noise."
    )
    step_ratio: float = Field(
        0.05, gt=0, le=0.5, description="Part of its share that the best class gives in one move."
    )
    far_gap: float = Field(0.10, gt=0, le=1, description="A shortfall above this is far.")
    step_far_ratio: float = Field(
        0.10, gt=0, le=0.5, description="Part that it gives to a class that is far below target."
    )
    give_back_above: float = Field(
        0.998, gt=0.5, le=1, description="Above this a class returns what it got, a step at a time."
    )
    return_step: float = Field(
        0.01,
        gt=0,
        le=0.5,
        description="Share of all that moves back to the configured shares per interval while all "
        "classes are in SLO.",
    )
    share_floor: float = Field(
        0.02,
        ge=0,
        le=0.25,
        description="No class falls below this share (or its configured one, when that is less).",
    )
    share_ceiling: float = Field(
        0.9, gt=0.25, le=1, description="No class rises above (or above its configured share)."
    )
    history_max: int = Field(
        200, ge=1, le=10_000, description="Moves that are remembered, oldest forgotten."
    )

    @model_validator(mode="after")
    def _ordered(self) -> SloSettings:
        if not self.floor < self.target <= self.give_back_above:
            raise ValueError("floor < target <= give_back_above must hold")
        if self.window_s_max < self.window_s:
            raise ValueError("window_s_max is less than window_s")
        if self.step_far_ratio < self.step_ratio:
            raise ValueError("step_far_ratio is less than step_ratio")
        return self


class DegradeSettings(Section):
    """What saturation costs requests that do not fit: shorter answers, a smaller model, refusal.

    Saturation is the worst of: wait over TTFT target, lack of prefill time, KV memory in use.
    """

    enabled: bool = Field(True, description="Whether requests are degraded at all.")
    cut_above: float = Field(
        0.8, gt=0, le=10, description="Saturation above which P2 and P3 get shorter answers."
    )
    shed_p3_above: float = Field(
        0.9, gt=0, le=10, description="Saturation above which P3 goes elsewhere or is refused."
    )
    shed_p2_above: float = Field(
        1.0, gt=0, le=10, description="Saturation above which P2 goes elsewhere or is refused."
    )
    hysteresis: float = Field(
        0.1, ge=0, le=1, description="A level ends only this far below where it begins."
    )
    rise_s: float = Field(
        1.0,
        ge=0,
        le=600,
        description="Seconds above a threshold until its level begins: one late request is no "
        "saturation.",
    )
    fall_s: float = Field(
        10.0, ge=0, le=3600, description="Seconds below it, hysteresis included, until it ends."
    )
    tokens_cap: int = Field(
        256, ge=1, le=1_000_000, description="max_tokens is cut to this; half of it a level higher."
    )
    tokens_floor: int = Field(
        64, ge=1, le=1_000_000, description="max_tokens is never cut below this."
    )
    structured: bool = Field(
        False,
        description="Whether requests for structured output (JSON, regex, grammar, tools) may be "
        "changed too: cut JSON is no JSON.",
    )
    fallback_from: int = Field(
        2,
        ge=0,
        le=3,
        description="The most urgent class that may be sent to its model's fallback.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> DegradeSettings:
        if not self.cut_above <= self.shed_p3_above <= self.shed_p2_above:
            raise ValueError("cut_above <= shed_p3_above <= shed_p2_above must hold")
        if self.tokens_floor > self.tokens_cap:
            raise ValueError("tokens_floor is above tokens_cap")
        return self


class DrainSettings(Section):
    """The estimate of how long a refused client should stay away."""

    memory_s: float = Field(
        10.0, ge=1, le=600, description="Seconds over which rates are averaged, old ones fading."
    )
    learn_s: float = Field(
        300.0,
        ge=1,
        le=86_400,
        description="Seconds over which predictions are compared with the waits that came of them.",
    )
    retry_after_s_max: float = Field(
        300.0, ge=1, le=86_400, description="Longest Retry-After, in seconds."
    )
    jitter_ratio: float = Field(
        0.3, ge=0, le=1, description="Stretched by up to this part, so that not all return at once."
    )


class PreemptSettings(Section):
    """Taking a worker's place from a less urgent request that has no first token yet."""

    enabled: bool = Field(
        False, description="Whether it is done at all; holding back and pacing do most of it."
    )
    done_ratio_max: float = Field(
        0.25, ge=0, lt=1, description="A victim's prefill may be done up to this share."
    )
    cost_ratio_max: float = Field(
        0.5,
        ge=0,
        le=10,
        description="Work thrown away may be this part of the seconds that the newcomer gains.",
    )
    overhead_s: float = Field(
        0.01, ge=0, le=10, description="Seconds that an abort and a second dispatch cost."
    )
