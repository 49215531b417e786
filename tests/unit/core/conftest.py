"""Property tests: as many examples on a busy machine as on an idle one, and no folder of examples in the checkout."""

from hypothesis import HealthCheck, settings

settings.register_profile("core", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("core")
