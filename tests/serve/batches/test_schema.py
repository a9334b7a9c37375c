"""Files and batches do what the server's OpenAPI document says."""

import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.serve.documented import check_operation
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


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    config = ServeConfig(server_port=0, batch_dir=str(tmp_path_factory.mktemp("batches")))
    with fake_pipeline() as pipe, serving_pipe(pipe, config) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_as_the_document_says(document, method, path, mode):
    check_operation(document, method, path, mode, max_examples=10)
    assert "422" not in document.raw_schema["paths"][path][method.lower()]["responses"], "an error has one form"
