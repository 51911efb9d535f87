"""The API document is true: schemathesis calls every operation by it, finds no 5xx and no lie."""

import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from paceline.api import ROUTES
from tests.api.conftest import BASE, bearer

EXAMPLES = {"positive": 2, "negative": 1}  # of each operation
# not part of the document
PAGES = {("GET", path) for path in ("/", "/fleet", "/docs", "/pages/{name}", "/openapi.json")}


@pytest.fixture(scope="module")
def rest(rest):
    rest.headers.update(bearer(rest.owner))
    return rest


# Some stay longer than a test does: a stream has no end of its own, polls wait.
SHORT = {"/events/stream": {"for_s": 0.01}, "/events": {"wait_s": 0}, "/workers/heartbeat": {}}


@pytest.fixture(scope="module")
def operations(rest):
    """Every operation of the document, by method and path."""
    with warnings.catch_warnings():  # late: one process of the run needs it
        warnings.simplefilter("ignore")
        import schemathesis
        from schemathesis.checks import load_all_checks
        from schemathesis.config import SchemathesisConfig
    load_all_checks()
    config = SchemathesisConfig.from_dict({"generation": {"with-security-parameters": False}})
    schema = schemathesis.openapi.from_dict(rest.app.openapi(), config=config)
    found = [each.ok() for each in schema.get_all_operations()]
    return {(each.method.upper(), each.path): each for each in found}


def checks():
    """All that hold of one answer; the rest need several operations or other credentials."""
    from schemathesis.checks import CHECKS

    names = (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "missing_required_header",
        "unsupported_method",
    )
    return [CHECKS.get_one(name) for name in names]


def send(rest, case):
    """Send what schemathesis made through the app, and give it the answer."""
    case.query = {**(case.query or {}), **SHORT.get(case.operation.path, {})}
    made = case.as_transport_kwargs(base_url=BASE)
    made.pop("cookies", None)
    if "data" in made:
        made["content"] = made.pop("data")
    made["headers"] = {**rest.headers, **made.get("headers", {})}
    return rest.request(**made, follow_redirects=False)


def test_the_document_names_every_route_its_scopes_and_the_form_of_errors(operations, rest):
    assert set(operations) == set(ROUTES) - PAGES
    document = rest.app.openapi()
    for (method, path), route in ROUTES.items():
        if (method, path) in PAGES:
            continue
        operation = document["paths"][path][method.lower()]
        assert operation["security"] == ([] if route.is_open else [{"token": []}]), path
        assert all(f"`{scope}`" in operation["description"] for scope in route.scopes), path
        error = operation["responses"]["default"]
        assert list(error["content"]) == ["application/problem+json"], path
        assert "422" not in operation["responses"], path
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.parametrize("key", sorted(set(ROUTES) - PAGES), ids=" ".join)
def test_no_input_breaks_an_operation_or_shows_its_document_false(operations, rest, key):
    from schemathesis import GenerationMode

    operation, held = operations[key], checks()
    takes_something = operation.body or list(operation.iter_parameters())
    for mode, examples in ((GenerationMode(name), most) for name, most in EXAMPLES.items()):
        if mode == GenerationMode.NEGATIVE and not takes_something:
            continue  # there is nothing in it that could be wrong
        calls = []

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data(), mode=st.just(mode), calls=st.just(calls))
        def fuzz(data, mode, calls):
            case = data.draw(operation.as_strategy(mode))
            answer = send(rest, case)
            calls.append(answer.status_code)
            case.validate_response(answer, checks=held)
            assert answer.status_code < 500, (case, answer.text)

        fuzz()
        assert calls
