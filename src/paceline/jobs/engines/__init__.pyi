from .contract import (
    Engine as Engine,
    Request as Request,
    Standing as Standing,
    engine_of as engine_of,
)
from .kubernetes import KubernetesEngine as KubernetesEngine
from .own import OwnAdmission as OwnAdmission, quotas_of as quotas_of
from .slurm import SlurmEngine as SlurmEngine
