"""Properties are judged by what they find, not by how fast a busy machine runs an example."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
