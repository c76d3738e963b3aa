"""Load tests: one definition of traffic for locust and for the simulator."""
