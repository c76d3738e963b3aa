"""How fast a worker prefills and decodes: a small physical model and its running estimates.

Prefill of u uncached tokens behind h cached ones takes `c*u + a*u*(h + u/2)` seconds, a decode step
of B streams over K tokens of KV takes `t + b*B + k*K` seconds (docs/policy.md). The defaults are
those of an 8B model on one H100; the score needs their ratio more than their size. A worker's
counters replace them; without counters, the first tokens that this router saw correct prefill.
"""

from __future__ import annotations

from typing import Final

from router.contract import LoadReport

PREFILL_S: Final = 26e-6  # per uncached prompt token
ATTENTION_S: Final = 1.2e-9  # per pair of tokens
_PAIRS_WEIGHT: Final = (
    ATTENTION_S / PREFILL_S
)  # what a pair costs, in tokens; much the same for all
STEP_S: Final = 6.5e-3
STEP_S_PER_STREAM: Final = 2e-5
STEP_S_PER_KV_TOKEN: Final = 5.2e-8

_WEIGHT: Final = 0.2  # of a new measurement; noise of single ones is about 20 %
# A measurement this far off is no noise: the engine changed its pace, and is believed at once.
_CHANGED_RATIO: Final = 2.0
_PREFILL_S_MIN: Final = 1e-7
_PREFILL_S_MAX: Final = 1e-1
_STEP_S_MIN: Final = 1e-4
_STEP_S_MAX: Final = 5.0
_TOKENS_MIN: Final = 512  # prefilled between two polls; fewer measure mostly overhead
_TOKENS_REMEMBERED: Final = 50_000  # sent lately: what a mean prompt is like
_BOUND_MIN: Final = 64  # tokens of a prompt whose time bounds the rate
_STEPS_MIN: Final = 10  # decoded between two polls
_MICROSECONDS: Final = 1e-6


class Rates:
    """Speed of one worker, in seconds. `counted` once its own counters were used."""

    __slots__ = (
        "_moments",
        "_pairs_sent",
        "_prefilled",
        "_tokens_sent",
        "attention_s",
        "counted",
        "prefill_s",
        "step_s",
        "step_s_per_kv_token",
        "step_s_per_stream",
    )

    def __init__(self) -> None:
        self.prefill_s = PREFILL_S
        self.attention_s = ATTENTION_S
        self.step_s = STEP_S
        self.step_s_per_stream = STEP_S_PER_STREAM
        self.step_s_per_kv_token = STEP_S_PER_KV_TOKEN
        self.counted = False
        self._prefilled: tuple[int, float] | None = None
        self._tokens_sent = self._pairs_sent = 0.0
        self._moments: tuple[float, ...] | None = None

    def prefill_time_s(self, uncached: float, cached: float) -> float:
        """Seconds to prefill `uncached` tokens behind `cached` ones on an idle worker."""
        return uncached * (self.prefill_s + self.attention_s * (cached + uncached / 2))

    def step_time_s(self, streams: float, kv_tokens: float) -> float:
        """Seconds of one decode step of `streams` over `kv_tokens` of KV memory."""
        return self.step_s + self.step_s_per_stream * streams + self.step_s_per_kv_token * kv_tokens

    def sent(self, uncached: float, cached: float) -> float:
        """A prompt was sent: counters will hold it. Returns its prefill time as predicted."""
        pairs = uncached * (cached + uncached / 2)
        self._tokens_sent += uncached
        self._pairs_sent += pairs
        if self._tokens_sent > _TOKENS_REMEMBERED:
            self._tokens_sent /= 2
            self._pairs_sent /= 2
        return uncached * self.prefill_s + pairs * self.attention_s

    def learn_report(self, report: LoadReport) -> None:
        """Use the counters of a report, as differences to those of the one before."""
        tokens, busy_s = report.prefill_tokens_total, report.prefill_busy_s_total
        if tokens is not None and busy_s is not None:
            self._learn_counters(tokens, busy_s)
        if report.decode_moments is not None and len(report.decode_moments) >= 5:
            self._learn_moments(report.decode_moments)

    def learn_first_token(self, *, uncached: int, elapsed_s: float) -> None:
        """An idle worker answered its first token after `elapsed_s`; used while it counts nothing.

        The time holds the network and a decode step too, so one step is taken off.
        """
        if not self.counted and uncached >= _TOKENS_MIN:
            tokens = uncached * (1 + _PAIRS_WEIGHT * uncached / 2)
            self._blend_prefill((elapsed_s - self.step_s) / tokens)

    def learn_bound(self, *, uncached: int, elapsed_s: float) -> None:
        """An answer began after `elapsed_s`: its prefill cannot have taken longer.

        Used while the worker counts nothing, so that a fast one is not held back by a guess.
        """
        if not self.counted and elapsed_s < uncached * self.prefill_s and uncached >= _BOUND_MIN:
            self._blend_prefill(elapsed_s / uncached)

    def _learn_counters(self, tokens: int, busy_s: float) -> None:
        before, self._prefilled = self._prefilled, (tokens, busy_s)
        if before is None or tokens < before[0] or busy_s < before[1]:
            return  # the first report, or the engine restarted
        if tokens - before[0] < _TOKENS_MIN:
            self._prefilled = before  # wait until the difference says something
            return
        # Counters know no pairs: those of the prompts that this router sent stand for all.
        pairs_per_token = self._pairs_sent / self._tokens_sent if self._tokens_sent else 0.0
        counted = (tokens - before[0]) * (1 + _PAIRS_WEIGHT * pairs_per_token)
        measured = (busy_s - before[1]) / counted
        if not self.counted and _PREFILL_S_MIN <= measured <= _PREFILL_S_MAX:
            self.counted = True
            self.prefill_s = measured
        self._blend_prefill(measured)

    def _blend_prefill(self, measured: float) -> None:
        if _PREFILL_S_MIN <= measured <= _PREFILL_S_MAX:
            self.prefill_s += _WEIGHT * (measured - self.prefill_s)
            self.attention_s = ATTENTION_S * self.prefill_s / PREFILL_S

    def _learn_moments(self, moments: tuple[float, ...]) -> None:
        """Regress step time on batch size over the steps since the report before.

        Moments are SGLang's: n, sum b, sum t, sum b^2, sum b*t with b streams, t microseconds.
        """
        before, self._moments = self._moments, moments
        if before is None or len(before) != len(moments) or moments[0] < before[0]:
            return
        steps, b, t, bb, bt = (new - old for new, old in zip(moments[:5], before[:5], strict=True))
        if steps < _STEPS_MIN:
            self._moments = before
            return
        spread = steps * bb - b * b
        if spread > 0.05 * b * b:
            slope = max(0.0, (steps * bt - b * t) / spread) * _MICROSECONDS
            self.step_s_per_stream += _WEIGHT * (slope - self.step_s_per_stream)
            # The slope holds the cost of the streams' KV memory; counting it twice is wrong.
            self.step_s_per_kv_token *= 1 - _WEIGHT
        mean_b, mean_t = b / steps, t / steps * _MICROSECONDS
        if _STEP_S_MIN <= mean_t <= _STEP_S_MAX:
            base = max(_STEP_S_MIN, mean_t - self.step_s_per_stream * mean_b)
            expected = self.step_s + self.step_s_per_stream * mean_b
            changed = not expected / _CHANGED_RATIO <= mean_t <= expected * _CHANGED_RATIO
            self.step_s += (1.0 if changed else _WEIGHT) * (base - self.step_s)
