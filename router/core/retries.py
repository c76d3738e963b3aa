"""How often and how soon a failed request is tried again: a budget and growing random pauses."""

from __future__ import annotations

from random import Random

from router.config import RetrySettings


class RetryBudget:
    """Retries are earned by requests that end well, so that they stay a small share of the load.

    Without it, workers that fail under load would get up to `1 + retries_max` times that load.
    """

    def __init__(self, settings: RetrySettings) -> None:
        self.configure(settings)
        self.tokens = settings.budget_tokens_max

    def configure(self, settings: RetrySettings) -> None:
        """Take over new settings."""
        self._tokens_max = settings.budget_tokens_max
        self._ratio = settings.budget_ratio

    def on_success(self) -> None:
        """A request ended well: earn a share of a retry."""
        if self.tokens < self._tokens_max:
            self.tokens = min(self._tokens_max, self.tokens + self._ratio)

    def take(self) -> bool:
        """Pay for one retry; False when the budget does not hold one."""
        # Sums of 0.1 fall short of 1 by rounding.
        if self.tokens < 1 - 1e-9:
            return False
        self.tokens = max(0.0, self.tokens - 1)
        return True


def pause_s(settings: RetrySettings, *, failed_attempts: int, rng: Random) -> float:
    """Seconds to wait before the next attempt after `failed_attempts` (at least 1).

    Grows by `backoff_factor` each time and is varied by a quarter either way, so that requests
    that failed together do not come back together. With the default factor each pause is longer
    than the one before it.
    """
    mean = settings.backoff_s * settings.backoff_factor ** (failed_attempts - 1)
    return min(settings.backoff_s_max, mean * rng.uniform(0.75, 1.25))
