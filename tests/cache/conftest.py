"""Generated examples may take as long as the host needs."""

from hypothesis import HealthCheck, settings

settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")
