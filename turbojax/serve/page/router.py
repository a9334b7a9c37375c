"""GET /: one HTML page with its style and its script inside; nothing else is ever fetched for it."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

FOLDER = Path(__file__).parent
SCRIPTS = ("api.js", "conversation.js", "monitor.js", "page.js")

router = APIRouter(tags=["page"])


class Page(NamedTuple):
    """The page as it is sent."""

    html: bytes
    headers: dict[str, str]


@cache
def page() -> Page:
    """Puts style and script into the page. The policy names their hashes: no other script or style ever runs."""
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    html = (FOLDER / "page.html").read_text(encoding="utf-8")
    html = html.replace("{{style}}", style).replace("{{script}}", script)
    policy = {
        "default-src": "'none'",
        "script-src": source(script),
        "style-src": source(style),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # text that becomes HTML or script raises in the browser
        "trusted-types": "'none'",
    }
    body = html.encode()
    return Page(
        body,
        {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        },
    )


def source(text: str) -> str:
    """An inline element as a policy names it."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@router.get("/", include_in_schema=False)
async def show_page(request: Request) -> Response:
    """The page, or 304 where the browser has it."""
    html, headers = page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)
