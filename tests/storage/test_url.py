from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.storage import join_url, parse_url


def test_url_names_bucket_and_key() -> None:
    assert parse_url("s3://bucket/a/b c/ü.bin") == ("bucket", "a/b c/ü.bin")
    assert parse_url("s3://bucket") == parse_url("s3://bucket/") == ("bucket", "")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/key",
        "http://bucket/key",
        "s3:///key",
        "s3://B/key",
        "s3://169.254.169.254@x/key",
        "s3://bucket/../secret",
        "s3://bucket/a/./b",
        "s3://bucket/a\nb",
        "s3://bucket/" + "k" * 3000,
    ],
)
def test_a_bad_url_says_what_is_wanted(url: str) -> None:
    with pytest.raises(InvalidInput, match="s3://bucket/key"):
        parse_url(url)


def test_urls_are_joined_by_single_slashes() -> None:
    assert join_url("s3://bucket/models/", "m", "/1/") == "s3://bucket/models/m/1"
