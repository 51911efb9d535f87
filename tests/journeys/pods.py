"""Pods without Kubernetes: ``kubectl`` keeps what it is given, and ``Pod`` runs a pod's process.

The process has the files, the variables and the command that the manifest names, on a host of the
testbed. Not imitated: schedulers and controllers, images, cgroups, policies, the pod's own network.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.journeys.hosts import Host

# `kubectl` as the page uses it: objects are kept below ~/kube, as files.
KUBECTL = r"""#!/opt/paceline/bin/python
import pathlib, sys
words, kept = sys.argv[1:], pathlib.Path.home() / "kube"
if words[0] == "-n":
    (kept / "namespaces" / words[1]).stat()
    words = words[2:]
match words:
    case ["create", "namespace", name]:
        (kept / "namespaces").mkdir(parents=True)
        (kept / "namespaces" / name).touch()
    case ["create", "secret", "generic", name, *sources] | ["create", "configmap", name, *sources]:
        made = kept / ("secrets" if words[1] == "secret" else "configmaps") / name
        made.mkdir(parents=True)
        for option, _, value in (each.partition("=") for each in sources):
            key, _, path = value.rpartition("=")
            place = pathlib.Path(path)
            if option == "--from-file" and key:
                (made / key).write_bytes(place.read_bytes())
                continue
            if option == "--from-file":
                for each in [place] if place.is_file() else place.iterdir():
                    (made / each.name).write_bytes(each.read_bytes())
                continue
            assert option == "--from-env-file", option
            for line in place.read_text().splitlines():
                if line and not line.startswith("#"):
                    key, _, content = line.partition("=")
                    (made / key).write_text(content)
    case ["label", "node", *nodes, label]:
        with (kept / "labels").open("a") as file:
            file.writelines(f"{each} {label}\n" for each in nodes)
    case ["apply", "-f", "-"]:
        with (kept / "applied").open("a") as file:
            file.write("---\n" + sys.stdin.read())
    case _:
        sys.exit(f"not a command of the page: {words}")
"""


def install_kubectl(host: Host) -> None:
    """Put ``kubectl`` into the host's PATH."""
    host.write("kubectl", KUBECTL)
    host.run("install", "-m", "755", "/home/user/kubectl", "/usr/bin/kubectl", root=True).ok()


def applied(host: Host) -> list[dict[str, Any]]:
    """Return every object that was applied on ``host``."""
    text = host.run("cat", "kube/applied").ok().out
    return [each for each in yaml.safe_load_all(text) if each]


class Pod:
    """A pod of one container, placed on a host; ``kept`` is where ``kubectl`` was used."""

    def __init__(
        self, spec: Mapping[str, Any], host: Host, kept: Host, node: str, env: Mapping[str, str]
    ) -> None:
        self.host, self._kept = host, kept
        (self._container,) = spec["containers"]
        fields = {"spec.nodeName": node, "status.hostIP": host.address}
        self.env = dict(env)
        for each in self._container.get("envFrom", []):
            self.env |= self._values(each["secretRef"])
        for each in self._container["env"]:
            known = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            self.env[each["name"]] = fields[known] if known else each["value"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounts = sorted(self._container["volumeMounts"], key=lambda each: each["mountPath"])
        for mount in mounts:
            self._mount(mount, volumes[mount["name"]])

    def start(self, log: Path) -> subprocess.Popen[Any]:
        """Start the container's process."""
        words = [*self._container["command"], *self._container["args"]]
        argv = [re.sub(r"\$\((\w+)\)", lambda found: self.env[found[1]], each) for each in words]
        return self.host.start(*argv, env=self.env, log=log, at="/tmp")

    def exec(self, *argv: str) -> None:
        """Run a command in the pod, as `kubectl exec` does."""
        self.host.run(*argv, env=self.env, at="/tmp").ok()

    def _values(self, reference: Mapping[str, Any]) -> dict[str, str]:
        place = f"kube/secrets/{reference['name']}"
        found = self._kept.run("ls", place)
        if found.code and reference.get("optional"):
            return {}
        return {
            key: self._kept.run("cat", f"{place}/{key}").ok().out for key in found.ok().out.split()
        }

    def _mount(self, mount: Mapping[str, Any], volume: Mapping[str, Any]) -> None:
        """Put a volume's files where the container has them, read-only where it says so."""
        at = mount["mountPath"]
        script = f'mkdir -p {at}; test {at} = /tmp -o {at} = /dev/shm || chown "$1:$1" {at}'
        if source := volume.get("secret") or volume.get("configMap"):
            name = source.get("secretName") or source["name"]
            kind = "secrets" if "secret" in volume else "configmaps"
            self._kept.copy(f"kube/{kind}/{name}", self.host)
            given = source.get("items") or [{"key": ""}]
            copied = " ".join(f"{name}/{shlex.quote(each['key'])}" for each in given)
            to = at
            if mount.get("subPath"):
                script = f"mkdir -p {Path(at).parent}"
            elif not source.get("items"):
                copied += "."
            script += f'; cp -r {copied} {to}; chown -R "$1:$1" {at}'
            script += f"; chmod -R u=rX,g=rX,o= {at}; rm -r {name}"
        if mount.get("readOnly"):
            script += f"; mount --bind {at} {at}; mount -o remount,bind,ro {at}"
        self.host.run(
            *("bash", "-euc", script, "bash", str(self.host.uid)), root=True, at="/home/user"
        ).ok()
