"""Laneway: a QoS router in front of SGLang workers.

The life of a request: `runtime.server` recognises an inference POST and collects its bounded body;
`api.auth` names the tenant; `wire` reads the few fields that policy needs; `runtime.driver` hands
them to `core.dispatcher`, which decides when and where it runs and says so in effects;
`runtime.relay` carries the bytes to the worker and back, and reports what happened. Each request
ends in exactly one record, from which metrics, access log and accounting are made.

Imports point down, never up or sideways: app, cli (5) > api (4) > runtime (3) > metrics, wire (2) >
core (1) > config, errors, contract, load_formats (0). tests/test_house.py holds that.
"""
