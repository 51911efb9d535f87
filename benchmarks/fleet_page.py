"""How long the fleet page takes in a browser while N agents beat; prints a table.

    python -m benchmarks.fleet_page --agents 1000 --refreshes 50

One real coordinator, agents as in ``coordinator_beats`` (one deployment in flight to all, rates
that change with every beat), and Chromium. Each view opens in a window of its own. First rows: from
the navigation until the view shows a row of the fleet. A refresh is a moment of the stream,
which has what changed of the fleet; its milliseconds are CPU time of the page's main thread, of
which some are style and layout. Long tasks (above 50 ms of wall time) are Chromium's own; the heap
is measured after a collection.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks import coordinator_beats as beats
from benchmarks.admission import cpu_model
from tests.support.browser import chromium, click, resize, see

if TYPE_CHECKING:
    from collections.abc import Iterator

# Counts the stream's bytes and moments, long tasks and when the first row is there.
WATCH = """
const seen = window.seen = {bytes: 0, moments: 0, long: [], rows: null};
new PerformanceObserver(list => list.getEntries().forEach(each => seen.long.push(each.duration)))
  .observe({type: "longtask", buffered: true});
const own = window.fetch;
window.fetch = async (path, ...rest) => {
  const answer = await own(path, ...rest);
  if (!String(path).startsWith("/events/stream") || !answer.ok) return answer;
  let size = 0;
  const counted = new TransformStream({transform(chunk, out) {
    seen.bytes += chunk.byteLength;
    size += chunk.byteLength;
    if (chunk.at(-1) === 10 && chunk.at(-2) === 10) {
      if (size > 1000) seen.moments += 1; // else it says that the stream lives
      size = 0;
    }
    out.enqueue(chunk);
  }});
  const {status, headers} = answer;
  return new Response(answer.body.pipeThrough(counted), {status, headers});
};
const look = setInterval(() => {
  if (!document.querySelector("#map tr td, #worker-list tr td, #worker dl dd, #tree")) return;
  seen.rows = performance.now();
  clearInterval(look);
}, 5);
"""
VIEWS = {"overview": "", "topology": "", "workers": "view=workers", "worker": "worker=node-7"}
OPENED_S = 60.0
CHUNKS = 500


@contextmanager
def fleet(agents: int) -> Iterator[tuple[str, str]]:
    """Yield URL and token of a coordinator to which ``agents`` agents beat."""
    limits = {"failures_per_minute": 1e9, "calls_per_s": 1e9}
    with beats.served({"beat_s": 1.0}, CHUNKS, security=limits) as made:
        draw = random.Random(1)
        load = beats.Load(
            made.url, made.token, made.source, agents, 1.0, CHUNKS,
            rate=lambda: draw.uniform(5e5, 5e6),
        )  # fmt: skip
        over = threading.Event()
        thread = threading.Thread(target=_beat, args=(load, over), daemon=True)
        thread.start()
        while not load.deployment_id:
            assert thread.is_alive(), "the agents ended"
            time.sleep(0.2)
        yield made.url, made.token
        assert thread.is_alive(), "the agents ended"
        over.set()
        thread.join(30.0)


def _beat(load: beats.Load, over: threading.Event) -> None:
    async def live() -> None:
        running = asyncio.ensure_future(load.run(1e9, lambda: beats.NOTHING))
        while not over.is_set() and not running.done():
            await asyncio.sleep(0.2)
        load.until_s = 0.0
        await running

    beats.PATIENCE_S = 600.0  # a busy machine's agents beat late, and do not end
    asyncio.run(live())


def measured(url: str, token: str, view: str, refreshes: int) -> dict[str, Any]:
    """Return what a window with ``view`` costs until it took in ``refreshes`` moments."""
    with chromium() as browser:
        command = browser.execute_cdp_cmd
        command("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        command("Performance.enable", {"timeDomain": "threadTicks"})
        resize(browser, 1280)
        browser.get(f"{url}/fleet#{VIEWS[view]}&token={token}")
        see(browser, "//*[@id='who' and contains(text(), 'Paceline')]", OPENED_S)
        if view == "topology":
            click(browser, "//*[@id='shapes']/button[@value='tree']")

        def look() -> tuple[dict[str, Any], dict[str, float]]:
            found = command("Performance.getMetrics", {})["metrics"]
            seen = browser.execute_script("return window.seen")
            return seen, {each["name"]: each["value"] for each in found}

        first, before = look()
        seen, after = first, before
        until = time.monotonic() + OPENED_S + 6.0 * refreshes
        while seen["moments"] < first["moments"] + refreshes and time.monotonic() < until:
            time.sleep(0.5)
            seen, after = look()
        command("HeapProfiler.collectGarbage", {})
        _, end = look()
        paint = browser.execute_script(
            "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        )
        count = max(1, seen["moments"] - first["moments"])
        later = seen["long"][len(first["long"]) :]

        def each_ms(name: str) -> float:
            return round((after[name] - before[name]) * 1e3 / count, 1)

        return {
            "view": view,
            "first_paint_ms": round(paint or 0),
            "first_rows_ms": round(seen["rows"] or 0),
            "opening_long_tasks": len(first["long"]),
            "longest_opening_ms": round(max(first["long"], default=0)),
            "refreshes": count,
            "refresh_ms": each_ms("TaskDuration"),
            "layout_ms": round(each_ms("LayoutDuration") + each_ms("RecalcStyleDuration"), 1),
            "long_tasks": len(later),
            "longest_ms": round(max(later, default=0)),
            "bytes": round((seen["bytes"] - first["bytes"]) / count),
            "heap_mb": round(end["JSHeapUsedSize"] / 1e6, 1),
            "elements": round(end["Nodes"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--refreshes", type=int, default=50)
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=[*VIEWS])
    asked = parser.parse_args()
    with fleet(asked.agents) as (url, token):
        print(f"{cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n", flush=True)
        for number, view in enumerate(asked.views):
            row = measured(url, token, view, asked.refreshes)
            if not number:
                print("|", " | ".join(row), "|\n|" + "---|" * len(row))
            print("|", " | ".join(map(str, row.values())), "|", flush=True)


if __name__ == "__main__":
    main()
