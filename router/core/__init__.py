"""The policy core: decides when and where each request runs. It does no I/O and reads no clock."""
