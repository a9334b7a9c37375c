"""What a server may be told, and what it says of the rest."""

from __future__ import annotations

import pytest

from turbojax.errors import ConfigError
from turbojax.serve.settings import ServeConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_keys", ("short",)),
        ("api_keys", ("with a space",)),
        ("api_keys", "one-text-alone"),
        ("allow_origins", ("example.com",)),
        ("allow_origins", ("https://example.com/path",)),
        ("max_connections", 0),
        ("max_concurrent_requests", True),
        ("max_body_bytes", 1.5),
        ("max_upload_bytes", -1),
        ("max_json_depth", 10_000),
        ("receive_timeout_s", 0),
        ("send_timeout_s", "60"),
        ("request_timeout_s", float("nan")),
        ("stall_s", float("inf")),
        ("drain_s", -1),
        ("log_level", "loud"),
        ("min_priority", 1),
        ("min_priority", "0"),
        ("batch_priority", -1),  # better than clients may have
    ],
)
def test_a_value_that_means_nothing_is_refused_by_its_field(field, value):
    with pytest.raises(ConfigError) as error:
        ServeConfig(**{field: value})
    assert (error.value.owner, error.value.field) == ("ServeConfig", field)


def test_a_certificate_needs_its_key():
    with pytest.raises(ConfigError, match="ssl_certfile"):
        ServeConfig(ssl_certfile="cert.pem")
    assert ServeConfig(ssl_certfile="cert.pem", ssl_keyfile="key.pem").ssl_keyfile == "key.pem"


def test_keys_are_shown_nowhere():
    with pytest.raises(ConfigError) as error:
        ServeConfig(api_keys=("sk-secret\n",))
    assert "secret" not in str(error.value)
    assert "sk-secret-1" not in repr(ServeConfig(api_keys=["sk-secret-1"]))
