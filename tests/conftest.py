"""Settings for all tests: examples are the same in every run, and slow machines are no failure."""

from hypothesis import settings

settings.register_profile("lab", derandomize=True, deadline=None)
settings.load_profile("lab")
