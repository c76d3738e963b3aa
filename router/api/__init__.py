"""The HTTP surface beside the hot path: routes, authentication, admin, operations."""
