from .calls import AccessClient as AccessClient, CoordinatorClient as CoordinatorClient
from .events import Follower as Follower, Item as Item, Lost as Lost
from .failover import SUSPECT_S as SUSPECT_S, Replicas as Replicas, error_of as error_of
