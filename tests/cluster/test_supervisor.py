"""The supervisor: everything starts or nothing does, and nothing outlives it. Stand-in services."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

import psutil
import pytest

from paceline import cluster as fleet
from paceline.cluster import Ready, ServiceSpec, installation
from paceline.cluster.supervisor import Supervisor
from paceline.config import Runtime, load_runtime
from paceline.errors import NotReady, PortInUse, StateLocked
from tests.cluster.conftest import eventually, processes_of, small_profile

SOON = ((signal.SIGINT, 1.0), (signal.SIGTERM, 10.0))
SERVICE = Path(__file__).with_name("stand_in_service.py")


def service(state: Path, name: str, *options: str, **fields: object) -> ServiceSpec:
    """A service that is ready once it has written its file; its processes name ``state``."""
    ready = state / f"{name}.ready"
    ready.unlink(missing_ok=True)
    argv = (
        sys.executable,
        "-S",
        str(SERVICE),
        "--ready",
        str(ready),
        "--marker",
        f"{state}/{name}",
    )
    return ServiceSpec.model_validate(
        {
            "name": name,
            "argv": (*argv, *options),
            "ready": Ready(kind="file", path=str(ready)),
            "stop_grace_s": 2.0,
            **fields,
        }
    )


def start(state: Path, *services: ServiceSpec, detach: bool = True, **settings: float) -> Runtime:
    state.mkdir(exist_ok=True)
    return fleet.start(
        small_profile(**settings), state, detach=detach, only=(), extra_services=services
    )


def all_gone(state: Path) -> bool:
    return processes_of(state) == []


def test_an_installation_starts_reports_and_stops_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    runtime = fleet.start(
        small_profile(),
        tmp_path,
        detach=True,
        only=(),
        extra_services=[
            service(tmp_path, "late", "--order", str(order), after=("early",), stop_phase=0),
            service(tmp_path, "early", "--order", str(order), stop_phase=1),
            ServiceSpec(
                name="once",
                argv=("test", "-e", f"{tmp_path}/early.ready"),
                ready=Ready(kind="exit"),
                after=("early",),
            ),
        ],
    )
    try:
        assert load_runtime(tmp_path) == runtime
        status = fleet.status(tmp_path)
        assert (status.running, status.ready, status.problem) == (True, True, "")
        states = {each.name: each.state for each in status.services}
        assert states == {"late": "ready", "early": "ready", "once": "done"}
        assert all(each.rss_bytes > 0 and each.processes == 2 for each in status.services[:2])
        for private in ("runtime.json", "secrets.json", "dask-tls/server-key.pem"):
            assert stat.S_IMODE((tmp_path / private).stat().st_mode) == 0o600
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
        with pytest.raises(StateLocked, match=f"pid {status.pid}"):
            start(tmp_path)
    finally:
        report = fleet.stop(tmp_path)
    assert (report.was_running, report.forced) == (True, False)
    assert order.read_text().split() == ["late", "early"]
    assert all_gone(tmp_path)
    assert not fleet.status(tmp_path).running
    assert not fleet.stop(tmp_path).was_running  # stopping what does not run is fine
    with pytest.raises(NotReady, match="nothing runs here"):
        load_runtime(tmp_path)
    again = start(tmp_path).secrets
    fleet.stop(tmp_path)
    assert again == runtime.secrets
    named = again.model_dump()
    for own in ("worker_token", "peer_token"):  # only a node that joined has its own
        assert not named.pop(own)
    assert all(named.values())


COMMAND = """
import signal, sys, time
from pathlib import Path
from paceline.cluster import ended_by_stop
state, run_id, background = sys.argv[1:]
if background:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
with ended_by_stop(Path(state), run_id):
    print(flush=True)
    try:
        time.sleep(600)
    finally:
        Path(state, "order").open("a").write(run_id + " ")
"""


def test_commands_that_run_a_flow_end_before_the_servers(tmp_path: Path) -> None:
    """One ends by Ctrl-C; one, in a script's background, ignores it; one was killed before."""
    start(tmp_path, service(tmp_path, "server", "--order", str(tmp_path / "order")))
    with contextlib.ExitStack() as commands:
        for words in (("run-a", ""), ("run-b", "in the background")):
            command = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(tmp_path), *words],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            assert commands.enter_context(command).stdout.readline()  # type: ignore[union-attr]
        (tmp_path / "commands" / f"run-c.{2**22 + 1}").touch()
        with mock.patch.object(installation, "COMMAND_ENDS_S", SOON):
            report = fleet.stop(tmp_path)
    assert report.runs == ("run-a", "run-b")
    assert (tmp_path / "order").read_text().split() == ["run-a", "run-b", "server"]
    assert not list((tmp_path / "commands").iterdir())


def test_a_killed_supervisor_takes_everything_with_it(tmp_path: Path) -> None:
    start(tmp_path, service(tmp_path, "deaf", "--deaf"), service(tmp_path, "fine"))
    assert len(processes_of(tmp_path)) >= 5  # supervisor, two services, their children
    os.kill(fleet.status(tmp_path).pid, signal.SIGKILL)
    eventually(lambda: all_gone(tmp_path))
    start(tmp_path, service(tmp_path, "fine"))  # and a new one takes over at once
    fleet.stop(tmp_path)
    assert all_gone(tmp_path)


def test_a_killed_guard_takes_its_service_with_it_and_the_service_returns(tmp_path: Path) -> None:
    start(tmp_path, service(tmp_path, "fine"))
    before = fleet.status(tmp_path).services[0]
    (tmp_path / "fine.ready").unlink()
    os.kill(before.session, signal.SIGKILL)
    eventually((tmp_path / "fine.ready").exists)
    assert not psutil.pid_exists(before.pid)
    children = [each for each in processes_of(tmp_path) if "time.sleep(600)" in str(each.cmdline())]
    eventually(lambda: sum(each.is_running() for each in children) <= 1)  # strays are found
    fleet.stop(tmp_path)
    assert all_gone(tmp_path)


def test_a_dead_holder_of_the_liveness_pipe_stops_all_and_keeps_the_state(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path\n"
            "from tests.cluster.test_supervisor import service, start\n"
            "state = Path(sys.argv[1])\n"
            "start(state, service(state, 'fine'), service(state, 'deaf', '--deaf'), detach=False)\n"
            "print('up', flush=True); time.sleep(600)\n",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        holder.kill()
    eventually(lambda: all_gone(tmp_path))
    assert (tmp_path / "secrets.json").exists()
    assert not fleet.status(tmp_path).running


def test_a_taken_port_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"MLflow is taken.*pid|process.*{port}") as caught:
            start(tmp_path, service(tmp_path, "fine"), mlflow_port=port)
    assert str(os.getpid()) in str(caught.value.got)
    assert not (tmp_path / "fine.ready").exists()
    assert all_gone(tmp_path)


def test_one_port_for_two_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PortInUse, match="asked for twice"):
        start(tmp_path, s3_port=18_321, mlflow_port=18_321)
    assert all_gone(tmp_path)


def ports_of(runtime: Runtime) -> list[int]:
    known = runtime.endpoints
    urls = (known.prefect_ui_url, known.mlflow_url, known.s3_url, *known.coordinator_urls)
    return [port for each in (*urls, known.scheduler_address) if (port := urlsplit(each).port)]


def test_ports_stay_an_installations_own_and_taken_ones_are_replaced(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    first, second = ports_of(start(here)), ports_of(start(there))
    fleet.stop(here)
    fleet.stop(there)
    assert len({*first, *second}) == len(first) + len(second)
    try:
        assert ports_of(start(there)) == second  # although the first's are free now
        with socket.create_server(("127.0.0.1", first[0])):
            again = ports_of(start(here))
        assert again[0] != first[0] and again[1:] == first[1:]
    finally:
        fleet.stop(here)
        fleet.stop(there)
    # A port that the profile names for another server is left to that.
    named = start(here, mlflow_port=again[0])
    fleet.stop(here)
    assert named.endpoints.mlflow_url.endswith(f":{again[0]}")
    assert len({*ports_of(named)}) == len(ports_of(named))


@pytest.mark.parametrize(
    "spoiled", ['{"Prefect": 99999999', '{"Prefect": 99999999}', '["Prefect"]', '{"S3": "x"}']
)
def test_ports_of_before_that_are_unreadable_are_no_ports(tmp_path: Path, spoiled: str) -> None:
    (tmp_path / "ports.json").write_text(spoiled)
    assert Supervisor(tmp_path, -1, None)._last_ports() == {}


def test_importing_the_package_brings_in_no_heavy_library() -> None:
    code = (
        "import sys, paceline.cluster; "
        "found = {'dask', 'distributed', 'psutil', 'cryptography'} & {*sys.modules}; "
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_service_that_fails_stops_all_and_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(
        NotReady, match=r"bad did not get ready: got exited with 1.*no disk"
    ) as told:
        start(tmp_path, service(tmp_path, "fine"), service(tmp_path, "bad", "--fail", "no disk"))
    assert str(told.value.where) == str(tmp_path / "logs" / "bad.log")
    assert all_gone(tmp_path)


def test_a_service_that_is_never_ready_misses_its_deadline(tmp_path: Path) -> None:
    # the port has a listener, which is not the service
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        check = Ready(kind="port", port=impostor.getsockname()[1])
        never = ServiceSpec(name="never", argv=("sleep", "600"), ready=check)
        profile = small_profile()
        services = profile.services.model_copy(update={"ready_timeout_s": 1.0})
        with pytest.raises(NotReady, match=r"never did not get ready: got not ready after"):
            fleet.start(
                profile.model_copy(update={"services": services}),
                tmp_path,
                detach=True,
                only=(),
                extra_services=[never],
            )
    assert all_gone(tmp_path)


def test_a_crashed_service_restarts_and_a_crash_loop_is_given_up(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "crashed"
    bad = service(tmp_path, "bad", "--fail", "no luck", blocking=False, max_restarts=1)
    start(tmp_path, service(tmp_path, "shaky", "--crash-once", str(mark)), bad)

    def settled() -> bool:
        shaky, given_up = fleet.status(tmp_path).services
        return shaky.restarts == 1 and shaky.state == "ready" and given_up.state == "failed"

    try:
        eventually(settled)
        assert "no luck" in fleet.status(tmp_path).problem
    finally:
        fleet.stop(tmp_path)
    assert all_gone(tmp_path)


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    never = Ready(kind="file", path=str(tmp_path / "no"))
    slow = service(tmp_path, "slow").model_copy(update={"ready": never})
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from paceline.cluster import ServiceSpec\n"
            "from tests.cluster.test_supervisor import start\n"
            "start(Path(sys.argv[1]), ServiceSpec.model_validate_json(sys.argv[2]))\n",
            str(tmp_path),
            slow.model_dump_json(),
        ],
        cwd=Path(__file__).parents[2],
    )
    with starter:
        eventually((tmp_path / "slow.ready").exists)
        starter.kill()
    eventually(lambda: all_gone(tmp_path))


def test_a_reserved_port_is_not_handed_out_but_can_be_listened_on() -> None:
    from paceline.cluster import reserve_port

    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            deadline = time.monotonic() + 5
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                assert time.monotonic() < deadline
        with socket.create_server(("127.0.0.1", port)):
            pass  # and again, as a restarted server does
