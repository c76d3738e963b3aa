"""Prefill pacing: how fast prompts may be sent to a worker without stopping its streams.

An engine that forms a prefill batch whenever it can starves decoding: while prompts keep coming,
every running stream stands still. So each worker has a credit of prefill seconds. It grows by the
duty `f = clamp(trim - step / TPOT*, duty_min, duty_max)` per second, where `step` is the predicted
time of a decode step and TPOT* the pace that the streams there shall keep, that of the tightest
class among them. Each prompt is charged with its predicted prefill time; a large one may overdraw
the credit and is paid for afterwards.

Once the credit is used up, it is saved for a while before prompts are sent again, several together:
an engine computes them in one pass, which costs less than one pass each, and its streams run
undisturbed in between.

`trim` makes good what the predictions get wrong: it is the predicted over the measured time of what
the worker did lately, prompts and decode steps. Where predictions say p for prompts and d for steps
of a second, trim is p + d and f = p + (steps per second - 1 / TPOT*) * step: whatever the errors,
it moves until the streams have TPOT*. It only ever slows down. Source: docs/policy.md, prefill
pacing.
"""

from __future__ import annotations

from math import exp
from typing import Final

from router.config import Config

TRIM_MIN: Final = 0.3
TRIM_MAX: Final = 1.0
_WINDOW_S: Final = 0.25  # of one measurement, at least
_TOKENS_MIN: Final = 16  # seen in one, at least
_MEMORY_S: Final = 2.0  # over which they are averaged


class PaceSettings:
    """The settings of pacing as plain attributes; a model's are found slowly.

    They are read for each sample of each stream, and whenever a worker's figures are derived.
    """

    __slots__ = (
        "by_tpot_target",
        "credit_kept_late_s",
        "credit_kept_s",
        "credit_resume_s",
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
        self.credit_resume_s = pacing.credit_resume_s
        self.credit_kept_late_s = max(pacing.credit_kept_s, pacing.credit_kept_late_s)
        self.debt_s_max = pacing.debt_s_max
        self.overdraft_s = pacing.overdraft_s
        self.streams_free = pacing.streams_free
        self.tpot_targets_s = config.tpot_targets_s
        self.by_tpot_target = config.by_tpot_target


class Pace:
    """The prefill credit of one worker. Times are seconds; credit is seconds of prefill."""

    __slots__ = (
        "_at",
        "_measured_s",
        "_predicted_s",
        "_prefill_s",
        "_since",
        "_step_s",
        "_streams",
        "_tokens",
        "credit_s",
        "duty",
        "saving",
        "trim",
    )

    def __init__(self) -> None:
        self.duty = 1.0
        self.trim = 1.0
        self.credit_s = 0.0  # as it was when last earned or charged
        self.saving = False  # the credit was used up and is not saved up again
        self._at: float | None = None
        self._step_s = 0.0  # as last predicted
        # The window that is being measured.
        self._since = 0.0
        self._streams = 0  # at its start; 0: none tells its pace
        self._tokens = 0.0
        self._prefill_s = 0.0  # predicted, of the prompts that were taken in
        # Those before it, fading; as if the time before the first had been foretold rightly.
        self._measured_s = self._predicted_s = _MEMORY_S

    def earn(self, settings: PaceSettings, *, step_s: float, tpot_s: float, now: float) -> None:
        """Bring the credit up to `now`, and the duty to the predicted time of a decode step."""
        credit_s = settings.credit_s_max
        if self._at is not None:
            passed_s = max(0.0, now - self._at)
            credit_s = min(credit_s, self.credit_s + self.duty * passed_s)
            if not self._streams and self.trim < TRIM_MAX:
                self._average(passed_s, passed_s)
        if credit_s <= settings.credit_kept_s:
            self.saving = True
        elif credit_s > settings.credit_resume_s:
            self.saving = False
        self.credit_s, self._at, self._step_s = credit_s, now, step_s
        wanted = self.trim - step_s / (settings.tpot_ratio * tpot_s)
        self.duty = min(settings.duty_max, max(settings.duty_min, wanted))

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

    def began(self, streams: int, now: float) -> None:
        """So many streams tell their pace from now on: of the time before nothing is known."""
        self._since, self._streams, self._tokens, self._prefill_s = now, streams, 0.0, 0.0

    def ended(self) -> None:
        """The last stream ended: while none tells its pace, what was measured fades."""
        self._streams = 0

    def prefilled(self, prefill_s: float) -> None:
        """A prompt was taken in, of `prefill_s` as predicted."""
        self._prefill_s += prefill_s

    def saw(self, tokens: float, streams: int, *, now: float) -> None:
        """Some stream of `streams` whose tokens are seen put out `tokens` more of each sample."""
        self._tokens += tokens
        elapsed_s = now - self._since
        if elapsed_s < _WINDOW_S or self._tokens < _TOKENS_MIN:
            return
        if self._step_s:  # not, where nothing is paced
            mean = max(1.0, (self._streams + streams) / 2)
            predicted_s = self._prefill_s + self._tokens / mean * self._step_s
            self._average(predicted_s, elapsed_s)
        self._since, self._streams, self._tokens, self._prefill_s = now, streams, 0.0, 0.0

    def _average(self, predicted_s: float, measured_s: float) -> None:
        """Take in what lasted `measured_s`; of a stall no more counts than is remembered."""
        kept = exp(-measured_s / _MEMORY_S)
        part = _MEMORY_S / measured_s if measured_s > _MEMORY_S else 1.0
        self._measured_s = self._measured_s * kept + part * measured_s
        self._predicted_s = self._predicted_s * kept + part * predicted_s
        self.trim = min(TRIM_MAX, max(TRIM_MIN, self._predicted_s / self._measured_s))
