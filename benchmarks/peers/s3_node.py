"""A node that downloads every object of a prefix with boto3's own transfer manager.

Reads its order (JSON), "go" and "end" from standard input; says {"ready"}, {"finished_at"} and
{"ended"}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config


def say(**what: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Take part."""
    order = json.loads(sys.stdin.readline())
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=order["endpoint_url"],
        aws_access_key_id=order["access_key"],
        aws_secret_access_key=order["secret_key"],
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            read_timeout=600,
            max_pool_connections=order["connections"],
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    transfer = TransferConfig(
        max_concurrency=order["connections"],
        multipart_chunksize=order["part_kib"] * 1024,
        multipart_threshold=order["part_kib"] * 1024,
    )
    say(ready=True)
    sys.stdin.readline()
    for key in order["keys"]:
        target = Path(order["save_path"]) / Path(key).name
        client.download_file(order["bucket"], key, str(target), Config=transfer)
    say(finished_at=time.time())
    sys.stdin.readline()
    say(ended=True)


if __name__ == "__main__":
    main()
