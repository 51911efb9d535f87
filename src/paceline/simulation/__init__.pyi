from .network import Network as Network, max_min_rates as max_min_rates
from .scenario import (
    Fault as Fault,
    Scenario as Scenario,
    Timing as Timing,
    read_faults as read_faults,
)
from .simulation import Simulation as Simulation, simulate as simulate
