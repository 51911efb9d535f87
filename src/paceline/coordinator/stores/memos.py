"""A deployment's memo as text, with the one thing in it that a reboot spoils: monotonic times."""

from __future__ import annotations

from pathlib import Path

from paceline.coordinator.memo import Memo


def write_memo(memo: Memo) -> str:
    """Return ``memo`` as JSON."""
    return memo.to_json()


def read_memo(text: str, now_s: float, *, same_boot: bool) -> Memo:
    """Return the memo in ``text``; where another boot (or machine) wrote it, its durations go on
    from where they were."""
    memo = Memo.from_json(text)
    # Linux's monotonic clock goes on across processes, and begins anew with a boot.
    return memo if same_boot else memo.rebased(now_s)


def boot_id() -> str:
    """Return what names this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown boot"
