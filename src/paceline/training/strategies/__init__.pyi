from .frames import HEADER as HEADER, Frame as Frame, FrameKind as FrameKind, receive as receive
from .job import run_role as run_role
from .learner import Learner as Learner, norm_of as norm_of
from .local_sgd import LocalSgd as LocalSgd
from .port import (
    BatchReport as BatchReport,
    Task as Task,
    Terms as Terms,
    Update as Update,
    UpdateLedger as UpdateLedger,
)
from .rendezvous import Rendezvous as Rendezvous
from .server import ParameterServer as ParameterServer
from .worker import GradientComputer as GradientComputer, Worker as Worker
