"""Three replicas of a played cluster."""

import pytest

from paceline.coordinator.stores import MemoryProgress
from tests.coordinator.conftest import small_manifest
from tests.coordinator.leader.fakes import Cluster, Node, until
from tests.support.etcd import etcd

__all__ = ["etcd"]


class Three:
    """Replicas a, b and c; ``leader`` is whoever leads now."""

    def __init__(self, path, manifest):
        self.cluster = Cluster(path)
        self.progress = MemoryProgress()
        self.nodes = [Node(name, self.cluster, self.progress, manifest) for name in "abc"]

    @property
    def leader(self):
        until(lambda: any(each.leads for each in self.nodes), "a leader")
        return next(each for each in self.nodes if each.leads)

    @property
    def standbys(self):
        leader = self.leader
        return [each for each in self.nodes if each is not leader]

    def follow_up(self):
        """Wait until every standby knows what the leader committed, and who it is."""
        leader = self.leader
        wanted = [each.deployment_id for each in leader.coordinator.read(lambda s: s.deployments())]

        def same(node):
            known = node.coordinator.read(lambda s: s.deployments())
            return (
                node.coordinator.leader == leader.coordinator.term
                and [each.deployment_id for each in known] == wanted
            )

        until(lambda: all(same(each) for each in self.standbys), "standbys that follow")


@pytest.fixture
def three(tmp_path):
    made = Three(tmp_path / "c.sqlite", small_manifest())
    for each in made.nodes:
        each.start()
    yield made
    for each in made.nodes:
        each.stop()
