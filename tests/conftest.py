"""Settings for every test: examples of property tests are the same in each run."""

from hypothesis import settings

settings.register_profile("paceline", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("paceline")
