"""A node of a libtorrent swarm: seeds or fetches one torrent, over TCP only, with known peers.

Reads its order (JSON), "go" and "end" from standard input; says {"ready"}, {"finished_at"} and
{"ended"}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import libtorrent as lt

PORT = 6881
LOOK_MS = 200


def session(order: dict[str, Any]) -> Any:
    """Return a session tuned for a fast, trusted, wired network; the order's settings go on top."""
    settings = {
        "listen_interfaces": f"{order['address']}:{PORT}",
        "outgoing_interfaces": "",
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        "in_enc_policy": int(lt.enc_policy.disabled),
        "out_enc_policy": int(lt.enc_policy.disabled),
        "allow_multiple_connections_per_ip": True,
        "close_redundant_connections": False,
        "max_out_request_queue": 4000,
        "max_allowed_in_request_queue": 8000,
        "request_queue_time": 10,
        "whole_pieces_threshold": 20,
        "connection_speed": 500,
        "smooth_connects": False,
        "peer_turnover": 0,
        "unchoke_slots_limit": -1,
        "seed_choking_algorithm": int(lt.seed_choking_algorithm_t.fastest_upload),
        "unchoke_interval": 2,
        "send_buffer_watermark": 4 * 1024 * 1024,
        "send_buffer_watermark_factor": 150,
        "alert_mask": int(lt.alert.category_t.status_notification),
        **order["settings"],
    }
    return lt.session(settings)


def parameters(order: dict[str, Any]) -> Any:
    """Return how the torrent is to be added."""
    parameters = lt.add_torrent_params()
    parameters.ti = lt.torrent_info(order["torrent"])
    parameters.save_path = order["save_path"]
    flags = parameters.flags & ~lt.torrent_flags.auto_managed & ~lt.torrent_flags.paused
    if order["seed"]:
        flags |= lt.torrent_flags.seed_mode
        if order["super_seeding"]:
            flags |= lt.torrent_flags.super_seeding
    if order["sequential"]:
        flags |= lt.torrent_flags.sequential_download
    parameters.flags = flags
    return parameters


def say(**what: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Take part."""
    order = json.loads(sys.stdin.readline())
    made = session(order)
    if order["seed"]:
        made.add_torrent(parameters(order))
        time.sleep(0.2)
        say(ready=True)
        while True:
            time.sleep(60.0)
    time.sleep(0.2)  # let it listen
    say(ready=True)
    sys.stdin.readline()
    handle = made.add_torrent(parameters(order))
    for address in order["peers"]:
        handle.connect_peer((address, PORT))
    while not handle.status().is_seeding:
        made.wait_for_alert(LOOK_MS)
        made.pop_alerts()
    say(finished_at=time.time())
    sys.stdin.readline()
    del handle, made  # blocks until what is verified is in the files
    say(ended=True)


if __name__ == "__main__":
    main()
