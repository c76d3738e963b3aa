"""Who gives way when a lane is full and one more comes.

The places of a lane are shared by the domains: what waits for other workers has no more claim to a
place than what waits for one's own. So the domain that has the most gives one up to any that has
less, whatever their classes, and a flood of one model costs no other its queue: each is sure of as
many places as it had if all had the same. Inside a domain a lower class gives way, and in the class
the tenant with the longest line, by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, islice

from router.contract import Lane
from router.core.bands import LINES_MAX, Domain
from router.core.drain import LATE
from router.core.line import Line
from router.core.types import Ticket


def victim(
    newcomer: Ticket,
    rank: int,
    own: Domain,
    domains: Collection[Domain],
    weight: Callable[[str], float],
) -> Ticket | None:
    """Who gives way to `newcomer`, which would wait in the band `rank` of `own`; None: nobody."""
    lane = newcomer.lane
    most = max(domains, key=lambda domain: domain.depths[lane])
    more = most.depths[lane] - own.depths[lane]
    theirs, ours = most.lowest(lane), own.lowest(lane)
    if theirs is not None and more > 1:
        return _last_of_longest(most, lane, theirs, weight)
    if ours is not None and ours > rank:
        return _latest(own, lane, ours)
    # With one place more than ours a change only turns that round.
    if theirs is not None and more == 1 and theirs > rank:
        return _last_of_longest(most, lane, theirs, weight)
    if rank == LATE:
        return None
    return _last_of_longest(own, lane, rank, weight, newcomer.spec.tenant)


def _latest(domain: Domain, lane: Lane, band: int) -> Ticket:
    crowd = domain.crowds[lane][band]
    return crowd[max(crowd)]


def _last_of_longest(
    domain: Domain,
    lane: Lane,
    band: int,
    weight: Callable[[str], float],
    tenant: str | None = None,
) -> Ticket | None:
    """The last of the line that is longest by its tenant's weight; among the late, the latest.

    If it is longer than that of `tenant`, of whom one more comes. Of very many lines only the
    oldest are looked at; who floods has had one for long.
    """
    if band == LATE:
        return _latest(domain, lane, band)
    lines = [stand.lines[band] for pool, stand in domain.stands.items() if pool.lane is lane]
    most = 0.0
    if tenant is not None:
        own = [line for by_tenant in lines if (line := by_tenant.get(tenant)) is not None]
        most = (1 + sum([line.count for line in own])) / weight(tenant)
    longest: Line | None = None
    for line in islice(chain.from_iterable(each.values() for each in lines), LINES_MAX):
        length = line.count / weight(line.tenant)
        if length > most and line.tenant != tenant:
            longest, most = line, length
    return None if longest is None else longest.last
