"""A promotion that waits is looked at and decided in the fleet page, as the owner of a token."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from paceline.cli.installation import run_pages
from paceline.client import AccessClient, CoordinatorClient
from paceline.registry import claim_digest
from paceline.schemas import CreateToken, DecidePromotion, StartFlow, new_run_id
from paceline.tasks._support.run import Run
from tests.api.conftest import Served
from tests.cli.test_approve import ask, judged, served  # noqa: F401
from tests.evaluation.reports import TRAINING_SNAPSHOT
from tests.support.browser import click, see
from tests.support.stack import wait_until
from tests.telemetry.test_fleet_page import text
from tests.telemetry.test_fleet_page_views import HOSTILE, confirm, fits, opened

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.timeout(240)]
WAITING = "//*[@id='approval']//h2/*[text()='waiting']"
BUTTON = "//*[@id='approval']//button[text()='{}']"


def token_of(served: Served, name: str, *scopes: Any) -> str:  # noqa: F811
    access = AccessClient(served.url, served.runtime.secrets.coordinator_token)
    return access.create_token(CreateToken(name=name, scopes=scopes)).token


def wait_for_approval(served: Served, evidence: Any = None, **changes: Any) -> str:  # noqa: F811
    """Have ann submit a run whose promotion waits; return the run's id."""
    run_id = new_run_id()
    ann = CoordinatorClient(served.url, token_of(served, "ann", "deploy"))
    ann.start_flow(StartFlow(flow="promote-model", run_id=run_id, parameters={"model_id": "m"}))
    ask(served, evidence or judged(), run_id=run_id, **changes)
    return run_id


def test_a_waiting_promotion_is_listed_shown_and_approved(served: Served) -> None:  # noqa: F811
    report = judged()
    checks = report.gate.checks
    evidence = report.model_copy(update={"job_id": HOSTILE})
    run_id = wait_for_approval(served, evidence, version=HOSTILE)
    known = served.runtime.endpoints.model_copy(update={"coordinator_url": served.url})
    runtime = served.runtime.model_copy(update={"endpoints": known})
    assert run_pages(runtime, run_id)["fleet"] == f"{served.url}/fleet#approval={run_id}"
    with opened(served, "view=approvals", token_of(served, "bob", "approve")) as browser:
        see(browser, "//nav/a[@aria-current and .='Approvals (1)']")
        row = see(browser, f"//*[@id='approval-list']//tr[contains(., '{run_id}')]").text
        assert "ann" in row
        assert "in 10 min" in row
        fits(browser, "approvals")
        click(browser, f"//*[@id='approval-list']//a[contains(@href, '{run_id}')]")
        see(browser, WAITING)
        shown = " ".join(text(browser, "#approval").split())
        for each in (
            "Asked by ann ",
            f"Training {HOSTILE}, on s3://paceline/data/snapshots/7777 (snapshot 77777777…)",
            "Base m 1 ",
            "40 documents, 100,000 bytes, of snapshot 55555555…",
            "candidate 2.4000 2.3500 to 2.4500 champion",
            "base 2.8000 2.7500 to 2.8500 -0.4000 -0.4500 to -0.3500 better",
            "ngram 2.1000 2.0500 to 2.1500 +0.3000 +0.2500 to +0.3500 worse",
            f"Gate: passed, {len(checks)} of {len(checks)} checks",
            "Slices worse than champion: 1",
            "directory: legal 2.5000 2.7500",
            *(each.name for each in checks),
        ):
            assert each in shown, f"{each!r} in {shown!r}"
        assert TRAINING_SNAPSHOT not in shown
        fits(browser, "approval")
        see(browser, BUTTON.format("Approve")).send_keys(Keys.ENTER)
        see(browser, "//dialog//input[@id='sure-reason']").send_keys("figures hold up")
        assert "as that of bob" in text(browser, "dialog")
        click(browser, "//button[@id='sure-yes']")
        see(browser, "//*[@id='approval']//h2/*[text()='approved']")
        assert "Decided\nby bob, " in text(browser, "#approval")
        assert not browser.find_elements("css selector", "main button.act")
        see(browser, "//nav/a[.='Approvals']")
    approval = served.client().approval(run_id).approval
    assert approval is not None
    assert (approval.approver, approval.reason) == ("bob", "figures hold up")
    assert approval.submitters == ("ann",)


def test_who_has_no_scope_looks_and_does_not_decide(served: Served) -> None:  # noqa: F811
    run_id = wait_for_approval(served)
    token = token_of(served, "eve", "deploy")
    with opened(served, f"approval={run_id}", token) as browser:
        see(browser, WAITING)
        assert "A token of scope approve decides it." in text(browser, "#approval")
        assert "Gate: passed" in text(browser, "#approval")
        assert not browser.find_elements("css selector", "main button.act")


def test_what_changed_before_the_decision_is_shown_and_not_approved(
    served: Served,  # noqa: F811
) -> None:
    taken = wait_for_approval(served)
    evidence = judged().model_copy(update={"job_id": "job-5"})
    forged = evidence.model_copy(update={"job_id": "job-6"}).model_dump(mode="json")
    untrusted = wait_for_approval(served, evidence)
    url = f"{served.runtime.records_url}/evidence/{claim_digest(evidence)}.json"
    Run(served.runtime, untrusted).store.put_bytes(url, json.dumps({"record": forged}).encode())
    carl = CoordinatorClient(served.url, token_of(served, "carl", "approve"))
    digest = carl.approval(taken).request.evidence_digest
    with opened(served, f"approval={taken}", token_of(served, "bob", "approve")) as browser:
        see(browser, BUTTON.format("Approve")).send_keys(Keys.ENTER)
        carl.decide_promotion(taken, DecidePromotion(evidence_digest=digest, approved=False))
        click(browser, "//button[@id='sure-yes']")
        refused = see(browser, "//*[@id='sure-error']").text
        assert refused == "this promotion was decided already; got: rejected by carl"
        click(browser, "//button[@id='sure-no']")
        see(browser, "//*[@id='approval']//h2/*[text()='rejected']")
        assert "Decided\nby carl, " in text(browser, "#approval")

        expires = wait_for_approval(served, expires_at=time.time() + 12)
        browser.get(f"{served.url}/fleet#approval={expires}")
        see(browser, WAITING)
        see(browser, BUTTON.format("Reject")).send_keys(Keys.ENTER)
        see(browser, "//*[@id='approval']//h2/*[text()='expired']", 60)  # behind the dialog
        click(browser, "//button[@id='sure-yes']")
        refused = see(browser, "//*[@id='sure-error' and contains(., 'is over')]").text
        assert "Submit it again, as a new run." in refused
        click(browser, "//button[@id='sure-no']")
        assert not browser.find_elements("css selector", "main button.act")
        browser.get(f"{served.url}/fleet#approval=run-none")
        see(browser, "//*[@id='approval']//*[contains(., 'no promotion of this run waits')]")

        browser.get(f"{served.url}/fleet#approval={untrusted}")
        see(browser, "//*[@id='approval']//*[@class='reason' and contains(., 'be trusted')]")
        assert not browser.find_elements("xpath", BUTTON.format("Approve"))
        confirm(browser, "Reject")
        waiting = served.client().approvals
        wait_until(lambda: untrusted not in {e.run_id for e in waiting()}, 30, "it is rejected")
