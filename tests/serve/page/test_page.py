"""The page as a reader uses it, in a browser: a conversation, its settings, what the server is doing."""

import json

import pytest

from tests.serve.page.stub import HOLD, says

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script> **<b>bold</b>** `<i>code</i>`"
METRICS = """# HELP what it is
turbojax_requests_running 3
turbojax_requests_waiting 2
kv_cache_usage_ratio 0.25
turbojax_generated_tokens_total{{model="a b"}} {tokens}
"""


def ask(page, text: str, wait: bool = True) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    if wait:
        page.locator("#chat[aria-busy=false]").wait_for()


def answers(page):
    return page.get_by_role("article", name="Answer")


def calls(name: str, *arguments: str):
    """Deltas of one call, its arguments in pieces."""
    yield {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": name, "arguments": ""}}]}
    for piece in arguments:
        yield {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}


def eventually(page, condition, what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        page.wait_for_timeout(25)
    pytest.fail(what)


def test_a_conversation_is_sent_whole_and_a_new_one_begins_empty(page, stub):
    stub.answers = [says("Good day to you."), says("Still here."), says("Hello?")]
    page.get_by_label("System prompt").fill("Be kind.")
    ask(page, "Good day")
    assert answers(page).locator(".content").inner_text() == "Good day to you."
    assert "42 tokens" in answers(page).inner_text()
    ask(page, "Again")
    assert stub.bodies[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Good day"},
        {"role": "assistant", "content": "Good day to you."},
        {"role": "user", "content": "Again"},
    ]
    page.get_by_role("button", name="New chat").click()
    assert answers(page).count() == 0
    ask(page, "Hello")
    assert [m["role"] for m in stub.bodies[2]["messages"]] == ["system", "user"]
    assert stub.bodies[0]["model"] == "tiny"
    assert stub.bodies[0]["stream"] is True


def test_what_a_model_says_stays_text(page, stub):
    stub.answers = [
        [{"reasoning_content": EVIL}, *says(EVIL + "\n\n```html\n" + EVIL + "\n```")],
        list(calls(EVIL, EVIL)),
    ]
    ask(page, EVIL)
    ask(page, EVIL)
    assert page.locator("#chat img, #chat script, #chat b, #chat i:not(.waiting i)").count() == 0
    content = answers(page).first.locator(".content")
    assert "<img src=x onerror=alert(1)><script>alert(2)</script> <b>bold</b> <i>code</i>" in content.inner_text()
    assert content.locator("pre code").inner_text() == EVIL
    assert content.locator("strong").inner_text() == "<b>bold</b>"
    assert page.locator(".turn.user").first.inner_text() == EVIL
    assert page.locator(".call code").inner_text() == EVIL


def test_stop_keeps_what_came_and_the_server_learns_of_it(page, stub):
    stub.answers = [[{"content": "The first half"}, HOLD], [HOLD], says("Yes.")]
    ask(page, "Go", wait=False)
    page.get_by_text("The first half").wait_for()
    page.get_by_role("button", name="Stop").click()
    answers(page).get_by_text("stopped").wait_for()
    eventually(page, lambda: stub.num_aborted == 1, "the request went on")
    ask(page, "A question that is taken back", wait=False)
    eventually(page, lambda: len(stub.bodies) == 2, "nothing was sent")
    page.keyboard.press("Escape")
    ask(page, "Are you there?")
    assert [m["content"] for m in stub.bodies[2]["messages"]] == ["Go", "The first half", "Are you there?"]
    assert page.locator(".turn.user").all_inner_texts() == ["Go", "Are you there?"]


def test_a_new_chat_ends_the_answer_that_comes(page, stub):
    stub.answers = [[{"content": "Once"}, HOLD], says("Fresh.")]
    ask(page, "A story", wait=False)
    page.get_by_text("Once").wait_for()
    page.get_by_role("button", name="New chat").click()
    eventually(page, lambda: stub.num_aborted == 1, "the request went on")
    ask(page, "Hello")
    assert answers(page).locator(".content").all_inner_texts() == ["Fresh."]
    assert [m["content"] for m in stub.bodies[1]["messages"]] == ["Hello"]


def test_settings_are_sent_where_they_are_given(page, stub):
    stub.answers = [says("a"), says("b")]
    ask(page, "one")
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 64, "seed": 7}
    labels = ("Temperature", "Top p", "Top k", "Most tokens of an answer", "Seed")
    for label, value in zip(labels, given.values(), strict=True):
        page.get_by_label(label, exact=True).fill(str(value))
    ask(page, "two")
    assert {name: stub.bodies[1].get(name) for name in given} == given
    assert not given.keys() & stub.bodies[0].keys()


def test_a_setting_that_cannot_be_is_not_sent(page, stub):
    for label, value in (("Temperature", "9"), ("Top k", "-1"), ("Tools", "{not json")):
        field = page.get_by_label(label, exact=True)
        field.fill(value)
        ask(page, "one")
        assert field.evaluate("field => field === document.activeElement")
        assert page.get_by_label("Message").input_value() == "one"
        field.fill("")
    assert stub.bodies == []


def test_reasoning_and_calls_are_shown_and_the_reader_plays_the_tool(page, stub):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    stub.answers = [
        [
            {"reasoning_content": "I need "},
            {"reasoning_content": "the weather."},
            *calls("weather", '{"city":', ' "Utrecht"}'),
            {"finish_reason": "tool_calls"},
        ],
        says("It is mild."),
    ]
    page.get_by_label("Tools").fill(json.dumps(tools))
    ask(page, "Is it warm?")
    assert page.locator("details div").inner_text() == "I need the weather."
    assert page.locator(".call h5").inner_text() == "Calls weather"
    assert page.locator(".call code").inner_text() == '{"city": "Utrecht"}'
    page.get_by_label("What weather answered").fill("18 degrees")
    page.get_by_role("button", name="Send to the model").click()
    page.get_by_text("It is mild.").wait_for()
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Utrecht"}'}}
    assert stub.bodies[1]["tools"] == tools
    assert stub.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    ]


def test_an_error_is_told_and_can_be_tried_again(page, stub):
    stub.answers = [(429, "The queue is full."), [{"content": "half"}], says("Now.")]
    stub.answers[1].append({"bad": "delta", "finish_reason": None})
    ask(page, "Hello")
    assert page.get_by_role("alert").inner_text() == "The queue is full."
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("half").wait_for()
    ask(page, "And?")
    assert [m["content"] for m in stub.bodies[1]["messages"]] == ["Hello"]
    assert [m["role"] for m in stub.bodies[2]["messages"]] == ["user", "assistant", "user"]


def test_a_key_is_asked_for_sent_and_forgotten_with_the_tab(open_page, stub, stub_url):
    stub.key = "secret"
    stub.answers = [says("Welcome.")]
    page = open_page(stub_url)
    ask(page, "Hello")
    assert "An API key is missing." in page.get_by_role("alert").inner_text()
    page.get_by_label("API key").fill("secret")
    page.get_by_label("Message").focus()
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("Welcome.").wait_for()
    assert page.evaluate("JSON.stringify(localStorage)") == "{}"
    assert page.evaluate("document.cookie") == ""
    page.reload()
    assert page.get_by_label("API key").input_value() == "secret"


def test_what_the_server_does_is_read_from_its_metrics(open_page, stub, stub_url):
    stub.metrics = METRICS.format(tokens=1000)
    page = open_page(stub_url)
    eventually(page, lambda: page.locator("#running").inner_text() == "3", "no figures")
    assert page.locator("#waiting").inner_text() == "2"
    assert page.get_by_role("meter").get_attribute("aria-valuenow") == "25"
    eventually(page, lambda: page.locator("#rate").inner_text() == "0", "no rate")
    stub.metrics = METRICS.format(tokens=1500)
    eventually(page, lambda: page.locator("#rate").inner_text() not in ("0", "\N{EN DASH}"), "no rate")
    stub.metrics = None
    page.get_by_text("The server does not answer").wait_for()
    assert page.locator("#running").inner_text() == "\N{EN DASH}"


def test_colours_follow_the_system_until_the_reader_chooses(open_page, stub_url):
    page = open_page(stub_url, color_scheme="dark")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    button = page.get_by_role("button", name="Dark colours")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "light"


def test_a_phone_shows_one_thing_at_a_time(open_page, stub, stub_url):
    stub.answers = [says("word " * 80 + "\n\n```\n" + "x" * 200 + "\n```")]
    page = open_page(stub_url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    panel = page.get_by_label("Settings and server")
    assert not panel.is_visible()
    page.get_by_role("button", name="Settings", exact=True).click()
    assert panel.bounding_box()["width"] == 360
    assert page.get_by_role("button", name="Close settings").evaluate("one => one === document.activeElement")
    page.keyboard.press("Escape")
    assert not panel.is_visible()
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("The answer is complete.").wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = [button.bounding_box() for button in page.get_by_role("button").all()]
    assert all(min(box["width"], box["height"]) >= 36 for box in boxes)


def test_everything_that_can_be_used_has_a_name_and_is_reached_by_keys(page):
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    usable = {"button", "textbox", "spinbutton", "combobox", "meter"}
    named = {
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in nodes
        if node.get("role", {}).get("value") in usable
    }
    assert len(named) >= 14
    assert all(name for _, name in named)
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"prompt", "new-chat", "theme", "panel-toggle", "chat", "temperature", "seed", "tools", "key"} <= reached
