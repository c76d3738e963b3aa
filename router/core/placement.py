"""Where a ticket goes: prefix hits, the policy's choice in its own lane, and spill-over.

Priority comes first: of several groups of workers only the highest with room is asked. Unless every
worker of the pool serves both lanes, the choice is made once per side and `lanes` compares the two.
"""

from __future__ import annotations

from math import inf
from random import Random
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.elephants import Elephants
from router.core.lanes import long_spills, short_spills
from router.core.openings import has_room
from router.core.pools import Group, Pool
from router.core.prefix import BLOCK_BYTES, PrefixIndex, bytes_of
from router.core.score import Hits, expected_hit, policy
from router.core.types import RequestRecord, Ticket
from router.core.worker import Worker

_NO_HITS: Hits = ()
# Larger groups are not looked at whole, unless none of the sample has room.
_SCAN_MAX: Final = 48
_OWN_FIRST_RATIO: Final = 0.5
_SAMPLE: Final = 16
_HOLDERS_MAX: Final = 4
# Part of its patience that a prompt may wait for a worker that has it cached: then one is left to
# send it elsewhere.
_PATIENCE_RATIO: Final = 0.5


class Placement:
    """Chooses workers and remembers which prefixes they were sent."""

    def __init__(
        self, config: Config, *, rng: Random, prefixes: PrefixIndex, elephants: Elephants
    ) -> None:
        self._rng = rng
        self._prefixes = prefixes
        self._elephants = elephants
        self._policy = config.policy
        self._pick = policy(config.policy, rng)
        self._turns = 0
        # Of the group that the last choice came from, what was looked at: these are up to date.
        self.seen: list[Worker] = []
        # The last answer of `hits`, which is asked for several times for each request.
        self._hits: Hits = _NO_HITS
        self._hits_of: Ticket | None
        self._hits_version = self._hits_prompt = -1
        self._awaited: dict[int, dict[int, float]] = {}  # by worker's bit
        self._awaited_as_of = -inf
        self._take_over(config)

    def configure(self, config: Config) -> None:
        """Take over a new configuration."""
        if config.policy != self._policy:
            self._policy = config.policy
            self._pick = policy(config.policy, self._rng)
        self._take_over(config)

    def _take_over(self, config: Config) -> None:
        self._spill_wait_s = config.lanes.spill_wait_s
        self._borrow_wait_s = config.cluster.borrow_wait_s
        self._prefix_counts = config.prefix.enabled
        self._hits_of = None
        self._wait_ratio = config.prefix.wait_ratio

    def choose(self, ticket: Ticket, pool: Pool, *, now: float) -> Worker | None:
        """The worker that `ticket` should run on now, None when it has to wait.

        Writes the expected prefix hit and whether it left its lane into the ticket; `seen` has the
        candidates.
        """
        hits = self.hits(ticket) if ticket.spec.prefix else _NO_HITS
        if ticket.prefill_whole_s > self._elephants.least_s:  # it may be one
            cached = hits[0][1] if hits else 0
            if self.is_elephant(ticket, pool, cached) and not self._elephants.may_start(pool, now):
                return None
        chosen = self._first_with_room(pool.groups, ticket, hits, now)
        ticket.spilled = False
        if pool.others:
            seen = self.seen
            other = self._spilled(ticket, pool, chosen, hits, now)
            if other is not None:
                ticket.spilled = True
                chosen = other
            else:
                self.seen = seen
        if chosen is None:
            return None
        own = expected_hit(hits, chosen) if hits else 0
        if hits and own < hits[0][1] and self._better_wait(ticket, chosen, hits[0], own, now):
            return None
        ticket.hit_tokens = own
        return chosen

    def _better_wait(
        self, ticket: Ticket, chosen: Worker, best: tuple[int, int], own: int, now: float
    ) -> bool:
        """Whether the prompt had better wait for a busy worker that has more of it cached.

        Prefill that a worker is spared is time for others, so it may take longer than here; but not
        so long that it is late, if it is not here. What it has waited so counts, and the prompts
        that wait for the same worker, or a beginning that many share would never leave its first
        one. A holder that has room is none to wait for: the policy could have had it.
        """
        bits, most = best
        prompt = ticket.prompt_tokens
        prefill_s = chosen.rates.prefill_time_s(prompt - own, own)
        chosen_wait_s = chosen.wait_s(now)
        here_s = chosen_wait_s + prefill_s
        left_s = ticket.arrived_at + ticket.ttft_target_whole_s - now
        since = now if ticket.cache_awaited_at is None else ticket.cache_awaited_at
        patience_s = _PATIENCE_RATIO * (ticket.held_until - since)
        need = ticket.kv_tokens, prompt - most
        for group in ticket.pool.groups:
            for worker in group.own.holders(bits, _HOLDERS_MAX):
                if not worker.may_take(ticket, now) or has_room(worker, ticket.rank, need, now):
                    continue
                paced_s = max(0.0, worker.paced_until[ticket.rank] - now)
                rest_s = worker.rates.prefill_time_s(prompt - most, most)
                ahead = self._awaiting(worker, now)
                ahead_s = sum([s for number, s in ahead.items() if number != ticket.number])
                wait_s = paced_s + worker.wait_s(now) + ahead_s
                worth_s = min(self._wait_ratio * (prefill_s - rest_s), patience_s)
                longer_s = now - since + wait_s - chosen_wait_s
                if longer_s < worth_s and not here_s <= left_s < wait_s + rest_s:
                    ticket.cache_awaited_at = since
                    ahead[ticket.number] = rest_s
                    return True
        return False

    def rather_waits(self, ticket: Ticket, now: float) -> bool:
        """Whether `ticket` could have gone somewhere just now, but waits for its cached prefix."""
        return self._awaited_as_of == now and any(
            ticket.number in ahead for ahead in self._awaited.values()
        )

    def _awaiting(self, worker: Worker, now: float) -> dict[int, float]:
        """Seconds of prefill by ticket, of those that at this moment rather wait for `worker`."""
        if self._awaited_as_of != now:
            self._awaited_as_of = now
            self._awaited.clear()
        return self._awaited.setdefault(worker.bit, {})

    def sent(self, ticket: Ticket, worker: Worker) -> None:
        """`worker` was sent the ticket's prompt: its turn is over, and it will hold the prefix."""
        worker.turn = self._turns = self._turns + 1
        if self._prefix_counts and ticket.spec.prefix:
            self._prefixes.add(worker.bit, ticket.spec.prefix, _room(worker, ticket))

    def hits(self, ticket: Ticket) -> Hits:
        """Who is expected to have how much of the ticket's prompt cached."""
        if (
            ticket is self._hits_of
            and self._prefixes.version == self._hits_version
            and ticket.prompt_tokens == self._hits_prompt
        ):
            return self._hits
        if not self._prefix_counts:
            return _NO_HITS
        hits = []
        for bits, depth in self._prefixes.depths(ticket.spec.prefix):
            hits.append((bits, _tokens(ticket, depth)))
        self._hits, self._hits_of = hits, ticket
        self._hits_version, self._hits_prompt = self._prefixes.version, ticket.prompt_tokens
        return hits

    def cached_tokens(self, ticket: Ticket) -> int:
        """What whoever has most of the prompt cached has of it; never all."""
        hits = self.hits(ticket) if ticket.spec.prefix else _NO_HITS
        return hits[0][1] if hits else 0

    def prompt_tokens_min(self, ticket: Ticket) -> int:
        """What whoever has most of the prompt cached would have to prefill of it."""
        return ticket.prompt_tokens - self.cached_tokens(ticket)

    def prompt_tokens_floor(self, ticket: Ticket) -> int:
        """What would be left of it for a worker that had all cached that is told apart."""
        return ticket.prompt_tokens - _tokens(ticket, len(ticket.spec.prefix))

    def uncached_s(self, ticket: Ticket, record: RequestRecord) -> float:
        """Seconds of prefill that the prompt of an ended request takes an idle worker.

        Without what was cached of it: as reported, else as expected of its worker, or, of one that
        was sent to none, of whoever has most.
        """
        prompt, cached, rates = record.prompt_tokens, record.cached_tokens, ticket.pool.rates
        if cached is None:
            prompt, cached = ticket.prompt_tokens, ticket.hit_tokens
            if record.dispatched_at is None:
                cached = prompt - self.prompt_tokens_min(ticket)
        if not cached or rates is None:
            return ticket.prefill_whole_s
        return rates.prefill_time_s(max(0, prompt - cached), cached)

    def is_elephant(self, ticket: Ticket, pool: Pool, cached: int) -> bool:
        """Whether `ticket` is an elephant where so many tokens of its prompt are cached."""
        if not self._elephants.is_one(ticket.prefill_whole_s):
            return False
        if cached and pool.rates is not None:
            left_s = pool.rates.prefill_time_s(ticket.prompt_tokens - cached, cached)
            return self._elephants.is_one(left_s)
        return True

    def _first_with_room(
        self, groups: list[Group], ticket: Ticket, hits: Hits, now: float
    ) -> Worker | None:
        for group in groups:
            own = group.own
            if len(own.workers) > _SCAN_MAX:
                worker = self._best_of_many(own, ticket, hits, now)
            else:
                self.seen = own.workers
                worker = self._pick(own.workers, ticket, hits, now)
            behind = group.lent and (worker is None or worker.wait_s(now) > self._borrow_wait_s)
            if behind and self._may_borrow(group, ticket, now):
                worker = self._borrowed(group.lent, worker, ticket, hits, now)
            if worker is not None:
                return worker
        return None

    def _best_of_many(self, group: Group, ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        if self._policy.name == "least_work":
            self.seen = self._sample(group, hits)
            worker = self._pick(self.seen, ticket, hits, now)
            if worker is not None:
                return worker
        self.seen = group.workers
        return self._pick(group.workers, ticket, hits, now)

    def _may_borrow(self, group: Group, ticket: Ticket, now: float) -> bool:
        """Whether `ticket` may go to a worker that another router owns.

        Its owner does not see it there for a while, and sends short prompts behind it. So a long
        one has to wait for an own worker first, if there is one that it did not try: half its
        target, as long as an elephant waits for its own (2.4).
        """
        if ticket.prefill_whole_s <= self._borrow_wait_s or not group.own.workers or ticket.tried:
            return True
        return now - ticket.arrived_at >= _OWN_FIRST_RATIO * ticket.ttft_target_whole_s

    def _borrowed(
        self, lent: list[Worker], own: Worker | None, ticket: Ticket, hits: Hits, now: float
    ) -> Worker | None:
        """The best of a few that other routers own, drawn at random, and of the best own one.

        What is known of them is a moment old, and all who saw the same best one among many would
        meet there. So while an own one has room it is two; without, each one that has is welcome.
        """
        few = _SAMPLE if own is None else 2
        candidates = self._rng.sample(lent, few) if len(lent) > few else list(lent)
        self.seen = self.seen + candidates
        if own is not None:
            candidates.append(own)
        return self._pick(candidates, ticket, hits, now)

    def _sample(self, group: Group, hits: Hits) -> list[Worker]:
        """Some workers of a large group, and some of those that hold the prompt's prefix.

        The best of 16 at random is among the best tenth with 81 %, and looking at all of 1,000
        would cost many times what the relay itself does.
        """
        workers = group.workers
        at = self._rng.randrange(len(workers))
        sample = workers[at : at + _SAMPLE]
        sample += workers[: _SAMPLE - len(sample)]
        for bits, _ in hits:
            sample += group.holders(bits, _SAMPLE + _HOLDERS_MAX - len(sample))
        return sample

    def _spilled(
        self, ticket: Ticket, pool: Pool, own: Worker | None, hits: Hits, now: float
    ) -> Worker | None:
        """The other lane's worker that takes `ticket`; None when it stays or waits."""
        wait_s_max = self._spill_wait_s
        own_s = inf
        if own is not None:
            own_s = own.ttft_s(ticket, expected_hit(hits, own), now=now)
            waits = own.waiting or own.foreign.pend_tokens
            if not waits or (ticket.lane is Lane.SHORT and own_s <= wait_s_max):
                return None
        other = self._first_with_room(pool.others, ticket, hits, now)
        own_max = pool.kv_own_max
        if other is None or not pool.groups or (own_max is not None and ticket.kv_tokens > own_max):
            return other  # nobody there, or nobody here who could ever hold it
        hit = expected_hit(hits, other)
        if ticket.lane is Lane.SHORT:
            other_s = other.ttft_s(ticket, hit, now=now)
            spills = short_spills(own_s, other_s, wait_s_max=wait_s_max)
        else:
            spills = long_spills(own_s, other, ticket, hit, wait_s_max=wait_s_max, now=now)
        return other if spills else None


def _tokens(ticket: Ticket, blocks: int) -> int:
    """Tokens in the first so many blocks of its prompt; the last token is always computed."""
    tokens = bytes_of(blocks) * ticket.prompt_tokens // (ticket.spec.prompt_bytes or 1)
    most = ticket.prompt_tokens - 1
    return tokens if tokens < most else most


def _room(worker: Worker, ticket: Ticket) -> int | None:
    """How many blocks of such text fit into this router's part of `worker`'s memory."""
    total = worker.kv_total_tokens
    if total is None:
        return None
    bytes_per_token = ticket.spec.prompt_bytes / ticket.prompt_tokens
    return int(total * bytes_per_token / (BLOCK_BYTES * worker.peers.sharers))
