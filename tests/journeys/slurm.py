"""A Slurm cluster on the hosts of a journey: real munged, slurmctld and slurmd.

The first host is the login node and runs the controller. The user has the same name and id on all
of them, as sites have it, and homes of their own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.journeys.hosts import Host, Site, until

PARTITION = "train"
_CONFIGURATION = """\
ClusterName=site
SlurmctldHost={control}({address})
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
StateSaveLocation=/var/tmp/slurmctld
SlurmdSpoolDir=/var/tmp/slurmd
SlurmUser=root
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MpiDefault=none
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
"""
# $1: the names of all hosts, $2: slurm.conf, $3: the user's id. Steps are counted without cgroups.
_PREPARE = """
cat >> /etc/hosts <<< "$1"
cat > /etc/slurm/slurm.conf <<< "$2"
printf 'CgroupPlugin=cgroup/v1\\nCgroupAutomount=no\\n' > /etc/slurm/cgroup.conf
mount -t tmpfs tmpfs /sys/fs/cgroup
useradd --uid "$3" --password '*' --no-create-home --home-dir /home/user ops
chown -R "$3:$3" /home/user
install -d -o munge -m 755 /run/munge
install -d /var/tmp/slurmctld /var/tmp/slurmd
"""


def slurm_name(host: Host) -> str:
    """Return the name that Slurm has for a host."""
    return f"host-{host.index}"


def start_slurm(bed: Site, logs: Path) -> None:
    """Start the daemons and wait until every node is idle; skips where Slurm is not installed."""
    if missing := [each for each in ("munged", "slurmctld", "slurmd") if not shutil.which(each)]:
        pytest.fail(f"not installed: {missing}; run `make setup-services`")
    control, *nodes = bed.hosts
    lines = [_CONFIGURATION.format(control=slurm_name(control), address=control.address)]
    cores = control.run("nproc").ok().out.strip()
    lines += [
        f"NodeName={slurm_name(each)} NodeAddr={each.address} CPUs={cores}\n" for each in nodes
    ]
    lines.append(f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=60 State=UP\n")
    names = "\n".join(f"{each.address} {slurm_name(each)}" for each in bed.hosts)
    for host in bed.hosts:
        prepare = ("bash", "-euc", _PREPARE, "prepare", names, "".join(lines), str(control.uid))
        host.run(*prepare, root=True).ok()
        munged = ("runuser", "-u", "munge", "--", "munged", "--force", "--foreground")
        host.start(*munged, log=logs / f"munged-{host.index}", root=True)
        until(lambda at=host: at.run("test", "-S", "/run/munge/munge.socket.2").code == 0, "munge")
    control.start("slurmctld", "-D", log=logs / "slurmctld", root=True)
    for host in nodes:
        start_node(host, logs)
    until(
        lambda: control.run("sinfo", "-h", "-t", "idle", "-o%D").out.strip() == str(len(nodes)),
        "every node is idle",
    )


def start_node(host: Host, logs: Path) -> None:
    """Start a node's daemon."""
    argv = ("slurmd", "-D", "-N", slurm_name(host))
    host.start(*argv, log=logs / f"slurmd-{host.index}", root=True)


def queue(control: Host) -> list[str]:
    """Return the state, reason and name of each job that is queued or runs."""
    return control.run("squeue", "--noheader", "-o%T|%r|%j").ok().out.splitlines()
