"""What other nodes are told is an address that they can reach."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.relay import advertised_address

NOBODY = ("",)


@pytest.mark.parametrize(
    ("listening", "wanted", "told"),
    [
        ("127.0.0.1:700", "", "127.0.0.1:700"),
        ("10.1.2.3:700", "", "10.1.2.3:700"),
        ("[fd00::1]:700", "", "[fd00::1]:700"),
        ("10.1.2.3:700", "node-3.rack-2.example", "node-3.rack-2.example:700"),
        ("0.0.0.0:700", "10.1.2.3", "10.1.2.3:700"),
        ("0.0.0.0:700", "fd00::1", "[fd00::1]:700"),
        ("[::]:700", "[fd00::1]", "[fd00::1]:700"),
    ],
)
def test_the_chosen_or_listening_address_is_advertised(
    listening: str, wanted: str, told: str
) -> None:
    assert advertised_address(listening, wanted, NOBODY) == told


def test_a_wildcard_listener_advertises_its_route_to_the_coordinator() -> None:
    urls = ("", "http://127.0.0.1:1", "http://localhost:2")
    assert advertised_address("0.0.0.0:700", "", urls) == "127.0.0.1:700"


@pytest.mark.parametrize(
    ("listening", "wanted"),
    [("0.0.0.0:700", ""), ("[::]:700", ""), ("10.1.2.3:700", "0.0.0.0"), ("10.1.2.3:700", "::")],
)
def test_an_unreachable_address_is_refused(listening: str, wanted: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        advertised_address(listening, wanted, NOBODY)
    assert "advertise" in str(refused.value)


def test_a_coordinator_that_cannot_be_found_shows_no_way() -> None:
    with pytest.raises(InvalidInput, match="no-such-host"):
        advertised_address("0.0.0.0:700", "", ("http://no-such-host.invalid:1",))
