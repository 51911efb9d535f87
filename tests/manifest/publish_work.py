"""A publish in a process of its own that may be killed: ``MODEL URL``, S3 by environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.manifest import publish_model
from paceline.storage import ObjectStore, uploads

PART = 5 * 1024 * 1024  # the least that S3 knows: a few megabytes are several parts


def work(model: Path, url: str, store: ObjectStore) -> None:
    """Publish ``model``."""
    uploads.PART_BYTES = PART
    publish_model(model, url, model_id="m", version="1", store=store, link_mbit=1000)


if __name__ == "__main__":
    work(
        Path(sys.argv[1]),
        sys.argv[2],
        ObjectStore(
            endpoint_url=os.environ["S3_URL"],
            access_key=os.environ["S3_KEY"],
            secret_key=os.environ["S3_SECRET"],
        ),
    )
