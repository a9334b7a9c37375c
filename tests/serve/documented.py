"""One operation of a server held against its OpenAPI document: right and wrong examples, by schemathesis."""

from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance


def check_operation(
    document: BaseSchema, method: str, path: str, mode: GenerationMode, *, max_examples: int = 12
) -> None:
    """Every answer is one that the document has. (What may be asked depends on more than a schema can say.)"""
    strategy = document[path][method].as_strategy(generation_mode=mode)

    @settings(max_examples=max_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def ask(case):
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    ask()
