"""Discrete-event simulation of a whole cluster: the real policy core against the engine model.

Time is virtual and jumps from event to event, every random choice comes from a seed, and equal
seeds give equal runs down to the digest of all records. A `Router` decides, the `Cluster` runs
engines and clients; routers are Laneway's own dispatcher or one of the baselines.
"""
