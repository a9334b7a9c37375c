"""What is sent as the page: one document, that may fetch nothing but its own server."""

import re

import httpx
import pytest

from turbojax.serve.page.router import FOLDER, SCRIPTS, page


@pytest.fixture
def answer(stub_url):
    return httpx.get(f"{stub_url}/", timeout=60)


def test_the_page_is_one_document_under_a_policy(answer):
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]{44}'", policy[name])
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_in_it_names_another_place(answer):
    html = answer.text
    targets = re.findall(r"""(?:src|href|action|url|@import)\s*[=(]?\s*["']([^"']*)""", html)
    assert targets
    assert all(target.startswith(("#", "data:image/svg+xml,")) for target in targets)
    assert set(re.findall(r"https?://[^\s'\"%]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "{{" not in html
    assert len(html) < 64_000


def test_it_is_sent_again_only_when_it_has_changed(stub_url, answer):
    again = httpx.get(f"{stub_url}/", headers={"If-None-Match": answer.headers["etag"]}, timeout=60)
    assert (again.status_code, again.content) == (304, b"")
    other = httpx.get(f"{stub_url}/", headers={"If-None-Match": '"another"'}, timeout=60)
    assert other.content == answer.content


def test_no_text_becomes_html_or_code():
    script = "".join((FOLDER / name).read_text() for name in SCRIPTS)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert sink not in script


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
def test_all_text_can_be_told_from_what_is_behind_it(index):
    themes = re.findall(r":root[^{]*\{([^}]*)\}", (FOLDER / "page.css").read_text())
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", themes[index]))
    pairs = [(ink, ground) for ink in ("ink", "muted") for ground in ("page", "surface", "soft", "wash")]
    pairs += [("problem", "page"), ("problem", "surface"), ("on-accent", "accent")]
    for ink, ground in pairs:
        low, high = sorted(luminance(colours[name]) for name in (ink, ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{ink} on {ground}"


def test_the_policy_is_that_of_what_is_sent():
    html = page().html.decode()
    assert html.count("<script>") == html.count("<style>") == 1
