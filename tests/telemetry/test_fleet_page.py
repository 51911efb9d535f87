"""The fleet page in a real browser, on a real coordinator's stream."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.schemas import Accelerator, Inventory, RegisterWorker
from tests.api.conftest import (
    FakeAgent,
    creation,
    make_model,
    make_runtime,
    running,
    served,  # noqa: F401
)
from tests.support.browser import chromium, see
from tests.support.stack import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]


def text(browser: Any, css: str) -> str:
    return str(browser.execute_script(f"return document.querySelector('{css}').innerText"))


def painted(browser: Any, row: int) -> list[int]:
    """Return the colours (as numbers) of a worker's strip, from its first chunk to its last."""
    script = """
        const canvas = document.querySelectorAll("td.map canvas")[arguments[0]];
        const pen = canvas.getContext("2d"), seen = [];
        for (let x = 1; x < canvas.width; x += Math.max(1, Math.floor(canvas.width / 50))) {
          const [r, g, b] = pen.getImageData(x, 4, 1, 1).data;
          seen.push(r * 65536 + g * 256 + b);
        }
        return seen;"""
    return [int(each) for each in browser.execute_script(script, row)]


def test_the_page_shows_holdings_and_failures_and_finds_the_leader_again(
    served: Any,  # noqa: F811
) -> None:
    url, manifest = make_model(served.runtime.state_dir, size=2 * 1024 * 1024)
    client = served.client()
    agents = [FakeAgent(client, f"node-{n}") for n in range(4)]
    for agent in agents:
        agent.register()
    names = [each.worker_id for each in agents]
    made = client.create(creation(url, names, max_failed=0.5), "key-1")
    with chromium() as browser:
        browser.get(f"{served.url}/fleet")
        see(browser, "//input[@id='token']").send_keys("not the token\n")
        see(browser, "//*[@id='refused']")
        browser.get(f"{served.url}/fleet#token={served.runtime.secrets.coordinator_token}")
        browser.refresh()  # the fragment alone does not load the page again
        see(browser, "//a[text()='node-3']")
        assert "token" not in browser.current_url
        assert "this replica leads, epoch 1" in text(browser, "#leader")
        assert "4" in text(browser, "#tiles")

        def everybody(*, but: int) -> None:
            for number, agent in enumerate(agents):
                if number != but:
                    agent.beat(manifest)

        def all_but_one_are_done() -> bool:
            everybody(but=2)
            return text(browser, "#map").count("complete") == 3

        wait_until(all_but_one_are_done, 40, "three workers are complete on the page")
        wait_until(lambda: "lost" in text(browser, "#map"), 40, "the silent one is lost")
        rows = [painted(browser, row) for row in range(4)]
        assert sum(row[0] == rows[0][0] for row in rows) == 3, "one has nothing, three have it"
        wait_until(lambda: "worker.lost node-2" in text(browser, "#events"), 20, "it is told")
        client.activate(made.deployment_id)

        def switching() -> bool:
            everybody(but=2)
            return "switching → " in text(browser, "#events")

        wait_until(switching, 20, "no version was before this one")
        assert "undefined" not in text(browser, "#events")

        served.end(signal.SIGKILL)
        wait_until(lambda: "trying again" in text(browser, "#live"), 20, "the page says so")
        served.start()
        wait_until(lambda: "live" in text(browser, "#live"), 30, "the page is live again")
        wait_until(lambda: "epoch 2" in text(browser, "#leader"), 20, "and knows the new term")
        severe = [
            each["message"] for each in browser.get_log("browser") if each["level"] == "SEVERE"
        ]
        log = [
            each for each in severe  # but for the wrong token and the kill
            if "Failed to load resource" not in each and "net::ERR" not in each
        ]  # fmt: skip
        assert log == [], "no error of the page itself"


def test_a_large_fleets_picture_is_kept_and_drawn_where_it_changed(tmp_path: Path) -> None:
    """New canvases with each message made the page lag."""
    count = 121  # one more than have a row each
    shown = """
        const canvas = document.getElementById("all"), pen = canvas.getContext("2d"), seen = [];
        canvas.kept ??= arguments[0];
        for (let row = 0; row < 121; row++)
          seen.push([...pen.getImageData(9, row * 4, 1, 1).data].join());
        return [canvas.kept, [...new Set(seen)]];"""
    with running(make_runtime(tmp_path / "state", beat_s=30)) as server, chromium() as browser:
        url, manifest = make_model(server.runtime.state_dir)
        client = server.client()
        agents = [FakeAgent(client, f"node-{n}", per_beat=10**6) for n in range(count)]
        for agent in agents:
            agent.register()
        client.create(creation(url, [each.worker_id for each in agents]), "key-1")
        browser.get(f"{server.url}/fleet#token={server.runtime.secrets.coordinator_token}")
        see(browser, "//canvas[@id='all']")
        _, empty = browser.execute_script(shown, "first")
        assert len(empty) == 1

        def drawn() -> bool:
            for agent in agents:
                agent.beat(manifest)
            return bool(browser.execute_script(shown, "later")[1] != empty)

        wait_until(drawn, 120, "rows are drawn as held")
        assert browser.execute_script(shown, "later")[0] == "first"


def test_the_page_shows_machines_and_findings_with_what_mends_them(
    served: Any,  # noqa: F811
) -> None:
    hostile = "disk: <img src=x onerror=document.title='run'> → Use <b>another</b> disk."
    gpus = Accelerator(kind="<i>H100</i>", count=8, memory_bytes=85 * 10**9, link="nvlink")
    has = Inventory(
        cores=96, memory_bytes=10**12, shared_memory_bytes=10**9, accelerators=(gpus,),
        interface="ens1", interface_mbit=25_000, disk_bytes_s=2e9,
    )  # fmt: skip
    new = RegisterWorker(
        worker_id="node-1", hostname="h1", rack="r1", available_storage=10**9,
        address="127.0.0.1:20001", findings=(hostile,), inventory=has,
    )  # fmt: skip
    old = new.model_dump(mode="json", exclude={"inventory", "findings"}) | {"worker_id": "node-2"}
    for each in (new, RegisterWorker.model_validate(old)):  # one of the release before
        served.client().register(each)
    with chromium() as browser:
        browser.get(f"{served.url}/fleet#token={served.runtime.secrets.coordinator_token}")
        see(browser, "//a[text()='node-2']")
        shown = text(browser, "#map")
        assert "disk: <img src=x onerror=document.title='run'>\n→ Use <b>another</b> disk." in shown
        assert "8 × <i>H100</i> 85 GB, 96 cores" in shown
        assert "ens1 25 Gbit/s, disk 2.0 GB/s" in shown
        assert browser.title != "run"
        assert browser.execute_script("return document.querySelectorAll('#map img').length") == 0
