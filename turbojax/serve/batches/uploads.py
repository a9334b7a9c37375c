"""What a form with an upload says, read field by field."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from turbojax.serve.batches.protocol import ExpiresAfter
from turbojax.serve.openai_errors import ApiError

FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_FILENAME_LEN = 255
SCHEMA: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "additionalProperties": False,
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                },
            }
        }
    },
}
"""Of the form, for the OpenAPI document."""


class Upload(NamedTuple):
    """A file that came, and how long it is kept."""

    file: UploadFile
    filename: str
    lifetime_s: int | None


def read_upload(form: FormData) -> Upload:
    """
    Raises:
        ApiError: a field is missing, wrong, unknown, or there twice.
    """
    fields = dict(form.multi_items())
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise ApiError(400, f"Unknown parameter: '{unknown[0]}'.", param=unknown[0], code="unknown_parameter")
    if len(fields) < len(form.multi_items()):
        raise ApiError(400, "a field is there twice")
    file = fields.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file: an upload in a multipart/form-data body is expected", param="file")
    if fields.get("purpose") != "batch":
        raise ApiError(400, "purpose: 'batch' is expected: files are for batches alone", param="purpose")
    filename = (file.filename or "upload.jsonl")[:MAX_FILENAME_LEN]
    return Upload(file, filename.encode(errors="replace").decode(), lifetime_of(fields))


def lifetime_of(fields: dict[str, Any]) -> int | None:
    """Seconds, of the two fields of `expires_after`.

    Raises:
        ApiError: they are not what is accepted.
    """
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    try:
        number = int(seconds) if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 9 else seconds
        return ExpiresAfter.model_validate({"anchor": anchor, "seconds": number}).seconds
    except ValidationError as error:
        accepted = "expires_after: anchor 'created_at' and seconds of 3600 .. 2592000 are expected"
        raise ApiError(400, accepted, param="expires_after") from error
