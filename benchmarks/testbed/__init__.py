"""Hosts in network namespaces with limited links: a data centre on one machine (root only).

    from benchmarks.testbed import start

    with start(hosts=8, rate_mbit=50, racks=2, oversubscription=4) as bed:
        bed.popen(0, ["ping", "-c1", bed.hosts[1].address]).wait()

Every host has a bridge port in its rack, limited in both directions; each rack has an uplink, and
the origin hangs on the spine behind a link of its own. Everything lives in namespaces whose names
begin with ``bed.prefix``; they go when the bed is closed, when its owner ends in any way (a watcher
holds the other end of a pipe), and at the latest when the next bed starts.
"""

from benchmarks.testbed.bed import Host, Testbed, start, why_not
from benchmarks.testbed.origin import S3Origin
from benchmarks.testbed.watcher import reap_stale

__all__ = ["Host", "S3Origin", "Testbed", "reap_stale", "start", "why_not"]
