"""Settings for all tests: examples are the same in every run, slow machines are no failure, runs tell nobody of themselves."""

import os

from hypothesis import settings

settings.register_profile("lab", derandomize=True, deadline=None)
settings.load_profile("lab")
os.environ |= {"LAB_NO_METRICS": "1", "LAB_NO_TRACKING": "1"}
