"""The page on the whole server: what it sends is accepted, what it reads is there."""

import httpx
from prometheus_client import CollectorRegistry

from tests.serve.harness import MODEL_NAME, serving_pipe
from tests.serve.page.test_page import answers, ask, eventually
from turbojax.engine.response import Response
from turbojax.serve.metrics import RequestMetrics
from turbojax.serve.observed import ObservedCall
from turbojax.serve.settings import ServeConfig

DASH = "\N{EN DASH}"


def test_a_chat_and_the_figures_of_a_server(open_page, fake_pipe):
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "temperature": 0}
    with serving_pipe(fake_pipe, ServeConfig(server_port=0, api_keys=("secret-key",))) as url:
        headers = {"Authorization": "Bearer secret-key"}
        direct = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
        page = open_page(url)
        page.get_by_text("The figures need an API key.").wait_for()
        page.get_by_label("API key").fill("secret-key")
        page.get_by_label("Most tokens of an answer").fill("9")
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("option", name=MODEL_NAME).wait_for(state="attached")
        ask(page, "Hello")
        assert answers(page).locator(".content").inner_text() == direct["choices"][0]["message"]["content"]
        assert f"{direct['usage']['completion_tokens']} token" in answers(page).inner_text()
        for figure in ("running", "waiting", "pool", "rate"):
            place = page.locator(f"#{figure}")
            eventually(page, lambda place=place: place.inner_text() != DASH, f"no {figure}")


def test_tokens_are_counted_while_they_come():
    registry = CollectorRegistry()
    call = ObservedCall(RequestMetrics(registry))
    for num_tokens in (1, 4):
        call.see(Response("a", [1], num_input_tokens=2, num_generated_tokens=num_tokens))
        assert registry.get_sample_value("turbojax_generated_tokens_total") == num_tokens
