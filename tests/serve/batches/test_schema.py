"""Files and batches do what the server's OpenAPI document says: examples made from it, by schemathesis."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.serve.harness import fake_pipeline, serving_pipe
from turbojax.serve.settings import ServeConfig

OPERATIONS = [
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
]
# An id cannot be wrong in its form: it is another one's.
CASES = [(*one, mode) for one in OPERATIONS for mode in GenerationMode if mode.is_positive or "{" not in one[1]]
BOUNDED = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    config = ServeConfig(server_port=0, batch_dir=str(tmp_path_factory.mktemp("batches")))
    with fake_pipeline() as pipe, serving_pipe(pipe, config) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_as_the_document_says(document, method, path, mode):
    operation = document[path][method]

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        # Which files there are, no schema can say.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    ask()
    assert "422" not in document.raw_schema["paths"][path][method.lower()]["responses"], "an error has one form"
