"""Prefill pacing: how fast prompts may be sent to a worker without stopping its streams.

An engine that forms a prefill batch whenever it can starves decoding: while prompts keep coming,
every running stream stands still. So each worker has a credit of prefill seconds. It grows by the
duty `f = clamp(1 - step / TPOT*, duty_min, duty_max)` per second, where `step` is the predicted
time of a decode step and TPOT* the pace that the streams there shall keep, that of the tightest
class among them. Each prompt is charged with its predicted prefill time. Dispatch needs a credit
above zero; a large prompt may overdraw it and is paid for afterwards. What the prediction gets
wrong is made good by `trim`, a factor on the duty that rises slowly while the measured time per
token is below TPOT* and falls fast when it is above
(additive increase, multiplicative decrease). Source: docs/policy.md, prefill pacing.
"""

from __future__ import annotations

from typing import Final

from router.config import Config

TRIM_MIN: Final = 0.6
TRIM_MAX: Final = 1.3
_TRIM_UP: Final = 0.03
_TRIM_DOWN: Final = 0.85
_WINDOW_S: Final = 0.25  # of one measurement of the streams' pace
_TOKENS_MIN: Final = 16


class PaceSettings:
    """The settings of pacing as plain attributes; a model's are found slowly.

    They are read for each sample of each stream, and whenever a worker's figures are derived.
    """

    __slots__ = (
        "by_tpot_target",
        "credit_kept_late_s",
        "credit_kept_s",
        "credit_s_max",
        "debt_s_max",
        "duty_max",
        "duty_min",
        "enabled",
        "overdraft_s",
        "prefill_ahead_s",
        "prefill_ahead_urgent_s",
        "streams_free",
        "tpot_ratio",
        "tpot_targets_s",
    )

    def __init__(self, config: Config) -> None:
        pacing = config.pacing
        self.enabled = pacing.enabled
        self.prefill_ahead_s = pacing.prefill_ahead_s
        self.prefill_ahead_urgent_s = pacing.prefill_ahead_urgent_s
        self.tpot_ratio = pacing.tpot_ratio
        self.duty_min = pacing.duty_min
        self.duty_max = pacing.duty_max
        self.credit_s_max = pacing.credit_s_max
        self.credit_kept_s = pacing.credit_kept_s
        self.credit_kept_late_s = pacing.credit_kept_late_s
        self.debt_s_max = pacing.debt_s_max
        self.overdraft_s = pacing.overdraft_s
        self.streams_free = pacing.streams_free
        self.tpot_targets_s = config.tpot_targets_s
        self.by_tpot_target = config.by_tpot_target


class Pace:
    """The prefill credit of one worker. Times are seconds; credit is seconds of prefill."""

    __slots__ = (
        "_at",
        "_since",
        "_tokens",
        "credit_s",
        "duty",
        "trim",
    )

    def __init__(self) -> None:
        self.duty = 1.0
        self.trim = 1.0
        self.credit_s = 0.0  # as it was when last earned or charged
        self._at: float | None = None
        self._since = 0.0  # the start of the window
        self._tokens = 0

    def earn(self, settings: PaceSettings, *, step_s: float, tpot_s: float, now: float) -> None:
        """Bring the credit up to `now`, and the duty to the predicted time of a decode step."""
        if self._at is None:
            self.credit_s = settings.credit_s_max
        else:
            earned = self.duty * max(0.0, now - self._at)
            self.credit_s = min(settings.credit_s_max, self.credit_s + earned)
        self._at = now
        wanted = (1.0 - step_s / (settings.tpot_ratio * tpot_s)) * self.trim
        self.duty = min(settings.duty_max, max(settings.duty_min, wanted))

    def tighten(self) -> None:
        """A tighter pace is wanted from now on: that a looser one was kept says nothing of it."""
        self.trim = min(self.trim, 1.0)

    def above_at(self, level_s: float, now: float) -> float:
        """When the credit is above `level_s`; `now` if it is."""
        if self.credit_s > level_s:
            return now
        return now + (1e-6 + level_s - self.credit_s) / self.duty

    def charge(self, prefill_s: float, *, debt_s_max: float) -> float:
        """Charge a prompt of `prefill_s` seconds; returns the credit that is left."""
        credit_s = self.credit_s - prefill_s
        self.credit_s = credit_s if credit_s > -debt_s_max else -debt_s_max
        return self.credit_s

    def began(self, now: float) -> None:
        """The first stream began after none ran: the time before is no slowness."""
        self._since, self._tokens = now, 0

    def saw(self, tokens: int, streams: int, *, tpot_s: float, now: float) -> None:
        """Some stream of `streams` whose tokens are seen put out `tokens` more: measure the pace.

        Over each window the mean time per token is stream seconds over tokens, pauses for prefill
        included.
        """
        self._tokens += tokens
        elapsed_s = now - self._since
        if elapsed_s < _WINDOW_S:
            return
        measured_s = streams * elapsed_s / max(1, self._tokens)
        if self._tokens >= _TOKENS_MIN:
            if measured_s > tpot_s:
                self.trim = max(TRIM_MIN, self.trim * _TRIM_DOWN)
            else:
                self.trim = min(TRIM_MAX, self.trim + _TRIM_UP)
        self._since, self._tokens = now, 0
