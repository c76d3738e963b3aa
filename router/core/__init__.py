"""The policy core: decides when and where each request runs. No I/O, no clock, no own randomness."""
