"""A program for hosts: hands out session tokens of a real STS in the ways that clouds do.

    roles.py --sts URL --seconds 6 [--port 8888] [--file PATH]

It calls AssumeRole on ``--sts`` with the keys of its environment, and answers on loopback: as a
container's credential endpoint (``/container``), as an instance's metadata service, and as an STS
that takes a web identity (POST). With ``--file`` it instead renews AWS's credentials file, as a
login or a sidecar does. Each token ends after ``--seconds``; each answer is a new one.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

METADATA = "/latest/meta-data/iam/security-credentials/"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sts", required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--file", type=Path)
    asked = parser.parse_args()
    # boto3 itself refuses sessions of less than 15 minutes
    sts = boto3.client(
        "sts",
        endpoint_url=asked.sts,
        region_name="us-east-1",
        config=Config(parameter_validation=False),
    )

    def assume() -> dict[str, Any]:
        answer = sts.assume_role(
            RoleArn="arn:aws:iam:::role/node", RoleSessionName="node", DurationSeconds=asked.seconds
        )
        return dict(answer["Credentials"])

    if asked.file is not None:
        renew_file(asked.file, assume, asked.seconds / 2)
    Handler.assume = staticmethod(assume)
    ThreadingHTTPServer(("127.0.0.1", asked.port), Handler).serve_forever()


def renew_file(path: Path, assume: Any, every_s: float) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    while True:
        found = assume()
        path.with_suffix(".new").write_text(
            f"[default]\naws_access_key_id={found['AccessKeyId']}\n"
            f"aws_secret_access_key={found['SecretAccessKey']}\n"
            f"aws_session_token={found['SessionToken']}\n"
        )
        path.with_suffix(".new").replace(path)
        time.sleep(every_s)


class Handler(BaseHTTPRequestHandler):
    assume: Any

    def do_PUT(self) -> None:
        self._send("metadata-token")

    def do_GET(self) -> None:
        if self.path == METADATA:
            self._send("node")
            return
        found = self.assume()
        self._send(
            json.dumps(
                {
                    "Code": "Success",
                    "Type": "AWS-HMAC",
                    "LastUpdated": datetime.now(UTC).isoformat(),
                    "AccessKeyId": found["AccessKeyId"],
                    "SecretAccessKey": found["SecretAccessKey"],
                    "Token": found["SessionToken"],
                    "Expiration": found["Expiration"].isoformat(),
                }
            )
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "Action=AssumeRoleWithWebIdentity" not in body or "of-the-cluster" not in body:
            self._send("<Error/>", 403)
            return
        found = self.assume()
        self._send(
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
            f"<AccessKeyId>{found['AccessKeyId']}</AccessKeyId>"
            f"<SecretAccessKey>{found['SecretAccessKey']}</SecretAccessKey>"
            f"<SessionToken>{found['SessionToken']}</SessionToken>"
            f"<Expiration>{found['Expiration'].isoformat()}</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


if __name__ == "__main__":
    main()
