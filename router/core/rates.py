"""How fast a worker prefills and decodes: a small physical model and its running estimates.

Prefill of u uncached tokens behind h cached ones takes `c*u + a*u*(h + u/2)` seconds, a decode step
of B streams over K tokens of KV takes `t + b*B + k*K` seconds. Defaults are those of an 8B model on
one H100; they matter less by their size than by their ratio, and measurements replace them.
"""

from __future__ import annotations

PREFILL_S_PER_TOKEN = 26e-6
ATTENTION_S_PER_TOKEN2 = 1.2e-9
STEP_S = 6.5e-3
STEP_S_PER_STREAM = 2e-5
STEP_S_PER_KV_TOKEN = 5.2e-8


class Rates:
    """Speed of one worker, in seconds."""

    __slots__ = ("attention_s", "prefill_s", "step_s", "step_s_per_kv_token", "step_s_per_stream")

    def __init__(self) -> None:
        self.prefill_s = PREFILL_S_PER_TOKEN
        self.attention_s = ATTENTION_S_PER_TOKEN2
        self.step_s = STEP_S
        self.step_s_per_stream = STEP_S_PER_STREAM
        self.step_s_per_kv_token = STEP_S_PER_KV_TOKEN
