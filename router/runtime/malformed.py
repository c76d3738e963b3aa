"""What is wrong with what another process said. Not compiled, as no exception is."""


class MalformedFrame(Exception):
    """Bytes that are no frame, or a message that is not of its kind's shape."""
