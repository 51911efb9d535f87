"""Whatever happens in whatever order: I4, I5, I11 and I12 hold (``fleet_model`` says how)."""

from hypothesis import HealthCheck, settings

from tests.coordinator.fleet_model import Fleet, read_back

__all__ = ["read_back"]

Fleet.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestFleet = Fleet.TestCase
