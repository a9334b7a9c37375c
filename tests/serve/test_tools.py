"""Tool calls and reasoning over HTTP through the `openai` client, whole and streamed, from an engine with a script."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest

from tests.pipeline.harness import wait_until_idle
from tests.serve.harness import MODEL_NAME, serving_pipe
from tests.serve.scripted import TEMPLATE, THINKING_TEMPLATE, scripted_pipeline
from turbojax.serve.settings import ServeConfig

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
PARIS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
GET_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
MISTRAL = (
    "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{{ tools | tojson }}"
    "{# writes [TOOL_CALLS], [ARGS] and [THINK] #}"
)


class Chat:
    """A client of a server whose model has a script."""

    def __init__(self, scripted, url):
        self.scripted = scripted
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, text, messages=ASK, **fields):
        """The message, and the finish reason, of what the model says."""
        self.scripted.say(text)
        (choice,) = self.client.chat.completions.create(model=MODEL_NAME, messages=messages, **fields).choices
        return choice.message, choice.finish_reason

    def stream(self, text, **fields):
        """The chunks' choices of the same."""
        self.scripted.say(text)
        with self.client.chat.completions.create(model=MODEL_NAME, messages=ASK, stream=True, **fields) as chunks:
            return [choice for chunk in chunks for choice in chunk.choices]


@pytest.fixture(scope="module", params=[THINKING_TEMPLATE], ids=["qwen3"])
def chat(request):
    with scripted_pipeline(request.param) as scripted:
        with serving_pipe(scripted.pipe) as url:
            chat = Chat(scripted, url)
            yield chat
            chat.client.close()
        assert wait_until_idle(scripted.pipe), "something leaked"


@pytest.fixture(scope="module")
def mistral():
    with scripted_pipeline(MISTRAL) as scripted, serving_pipe(scripted.pipe) as url:
        chat = Chat(scripted, url)
        yield chat
        chat.client.close()


def calls_of(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def gathered(choices):
    """Content, reasoning and calls of a stream's deltas, as a client puts them together."""
    content = reasoning = ""
    calls = {}
    for choice in choices:
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            assert call.index == len(calls) - 1
            assert call.id in (known["id"], None)
            known["arguments"] += call.function.arguments or ""
    return content, reasoning, list(calls.values())


def test_a_call_comes_as_openai_has_it(chat):
    message, reason = chat.ask("One moment.\n" + CALL, tools=[WEATHER])
    assert reason == "tool_calls"
    assert message.content == "One moment."
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS)


def test_tokens_of_reasoning_are_counted(chat):
    """A letter is a token here, and so is a tag; tags and white space around may count or not."""
    thought = "I look at the sky, and it is blue."
    for text in (f"<think>\n{thought}\n</think>\n\nBlue.", f"<think>\n{thought}\n</think>\n\n{CALL}", "Blue.", CALL):
        chat.scripted.say(text)
        answer = chat.client.chat.completions.create(model=MODEL_NAME, messages=ASK, tools=[WEATHER])
        num_tokens = answer.usage.completion_tokens_details.reasoning_tokens
        if thought in text:
            assert len(thought) <= num_tokens <= len(thought) + 6
        else:
            assert num_tokens == 0


def test_a_call_alone_has_no_content(chat):
    message, reason = chat.ask(f"{CALL}\n{GET_TIME}", tools=[WEATHER, TIME])
    assert (message.content, reason) == (None, "tool_calls")
    assert calls_of(message) == [("get_weather", PARIS), ("get_time", "{}")]


def test_a_stream_says_the_same(chat):
    text = f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{GET_TIME}"
    choices = chat.stream(text, tools=[WEATHER, TIME])
    content, reasoning, calls = gathered(choices)
    assert (content, reasoning) == ("One moment.", "I look.")
    assert [(call["name"], call["arguments"]) for call in calls] == [("get_weather", PARIS), ("get_time", "{}")]
    assert len({call["id"] for call in calls}) == 2
    assert choices[-1].finish_reason == "tool_calls"
    assert all(choice.finish_reason is None for choice in choices[:-1])


def test_the_client_s_own_stream_of_events_reads_it(chat):
    chat.scripted.say(CALL)
    with chat.client.chat.completions.stream(model=MODEL_NAME, messages=ASK, tools=[WEATHER]) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert calls_of(message) == [("get_weather", PARIS)]
    assert "tool_calls.function.arguments.done" in events


async def collect(url, n):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = await client.chat.completions.create(model=MODEL_NAME, messages=ASK, tools=[WEATHER], n=n, stream=True)
        return [choice async for chunk in stream for choice in chunk.choices]


def test_every_sample_has_calls_of_its_own(chat):
    chat.scripted.say(CALL)
    url = str(chat.client.base_url).removesuffix("/v1/")
    choices = asyncio.run(collect(url, 2))
    ids = set()
    for index in range(2):
        _, _, (call,) = gathered(choice for choice in choices if choice.index == index)
        assert call["arguments"] == PARIS
        ids.add(call["id"])
    assert len(ids) == 2


def test_the_result_of_a_call_goes_back_to_the_model(chat):
    message, _ = chat.ask(CALL, tools=[WEATHER])
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny"}
    answer, reason = chat.ask("It is sunny.", messages=[*ASK, message, result], tools=[WEATHER])
    assert (answer.content, answer.tool_calls, reason) == ("It is sunny.", None, "stop")


def test_reasoning_is_apart_from_content(chat):
    message, reason = chat.ask("<think>\nHm.\n</think>\n\nFour.")
    assert (message.content, message.reasoning_content, reason) == ("Four.", "Hm.", "stop")
    off, _ = chat.ask("<think> is a tag", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert off.content == "<think> is a tag"


ASKED = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\nIt is"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, f"{ASKED}<|im_end|>\n<|im_start|>assistant\n"),
        ({"continue_final_message": True}, ASKED),
        ({"add_generation_prompt": False}, f"{ASKED}<|im_end|>\n"),
    ],
)
def test_the_prompt_ends_where_the_answer_is_to_begin(chat, fields, prompt):
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    chat.scripted.say(" sunny.")
    answer = chat.client.chat.completions.create(model=MODEL_NAME, messages=begun, extra_body=fields)
    assert answer.choices[0].message.content == " sunny."
    assert answer.usage.prompt_tokens == len(chat.scripted.pipe.tokenizer.encode(prompt, add_special_tokens=False))


def test_a_malformed_call_is_content(chat):
    message, reason = chat.ask("<tool_call>get_weather(Paris)</tool_call>", tools=[WEATHER])
    assert (message.content, message.tool_calls, reason) == ("<tool_call>get_weather(Paris)</tool_call>", None, "stop")


def test_a_call_that_is_cut_off_says_so(chat):
    message, reason = chat.ask(CALL, tools=[WEATHER], max_tokens=50)
    assert reason == "length"
    assert calls_of(message)[0][0] == "get_weather"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(calls_of(message)[0][1])


def test_tools_that_must_not_be_called_are_not_looked_for(chat):
    message, reason = chat.ask(CALL, tools=[WEATHER], tool_choice="none")
    assert (message.content, reason) == (CALL, "stop")


def test_parallel_calls_can_be_left_out(chat):
    message, _ = chat.ask(f"{CALL}\n{GET_TIME}", tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert calls_of(message) == [("get_weather", PARIS)]


@pytest.mark.parametrize("script", [CALL, "Hello", "", '<tool_call>\n{"name": "other"'])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_forced(chat, script, choice):
    """Whatever the model would say, its calls are of the tools, with arguments of their schema."""
    message, reason = chat.ask(
        script, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    assert reason == "tool_calls"
    ((name, arguments),) = calls_of(message)
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    if script == CALL:
        assert arguments == PARIS


THINK = "<think>\nHm.\n</think>\n\n"


def test_a_form_is_of_the_content_and_reasoning_stands_before_it(chat):
    schema = WEATHER["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    message, reason = chat.ask(THINK + PARIS, response_format=form)
    assert (message.content, message.reasoning_content, reason) == (PARIS, "Hm.", "stop")
    message, reason = chat.ask(THINK + "Paris it is", response_format=form)
    assert message.reasoning_content == "Hm."
    assert json.loads(message.content)["city"] in ("Paris", "Rome")


def test_beside_tools_a_form_is_of_answers_that_call_none(chat):
    schema = TIME["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    message, reason = chat.ask(CALL, tools=[WEATHER], response_format=form)
    assert (calls_of(message), message.content, reason) == ([("get_weather", PARIS)], None, "tool_calls")
    message, reason = chat.ask("{}", tools=[WEATHER], response_format=form)
    assert (message.content, message.tool_calls, reason) == ("{}", None, "stop")


def test_a_strict_tool_is_called_as_its_schema_says(chat):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    for script in (CALL, CALL.replace("Paris", "Oslo"), CALL.replace("city", "town")):
        message, _ = chat.ask(THINK + "Let me see. " + script, tools=[strict])
        ((_, arguments),) = calls_of(message)
        assert json.loads(arguments)["city"] in ("Paris", "Rome")
        assert message.content == "Let me see."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "add_generation_prompt",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}},
            "chat_template_kwargs.chat_template",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
         "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_path(chat, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat.ask("Hello", **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_schema_that_does_not_compile_is_the_tools_fault(chat):
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat.ask("Hello", tools=[broken], tool_choice="required")
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", None, None),
        (f'[THINK]Hm[/THINK]So[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', "So", "Hm"),
    ],
)
def test_tags_that_are_special_tokens_are_read(mistral, text, content, reasoning):
    message, reason = mistral.ask(text, tools=[WEATHER])
    assert (message.content, reason) == (content, "tool_calls")
    assert calls_of(message) == [("get_weather", PARIS)]
    assert getattr(message, "reasoning_content", None) == reasoning
    assert len(message.tool_calls[0].id) == 9


@contextmanager
def served(scripted, **config):
    with serving_pipe(scripted.pipe, ServeConfig(server_port=0, **config)) as url:
        chat = Chat(scripted, url)
        yield chat
        chat.client.close()


def test_a_server_has_a_chat_template_of_its_own(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    with scripted_pipeline("{% for m in messages %}{{ m.content }}{% endfor %}") as scripted:
        with served(scripted) as chat, pytest.raises(openai.BadRequestError, match="--chat-template"):
            chat.ask(CALL, tools=[WEATHER])
        with served(scripted, chat_template=str(path)) as chat:
            path.write_text("{{ messages }} changed: nobody reads it any more")
            assert calls_of(chat.ask(CALL, tools=[WEATHER])[0]) == [("get_weather", PARIS)]


def test_a_server_is_told_how_calls_are_written():
    with scripted_pipeline() as scripted:
        with served(scripted, tool_call_parser="llama3") as chat:
            message, _ = chat.ask('{"name": "get_weather", "parameters": {"city": "Paris"}}', tools=[WEATHER])
            assert calls_of(message) == [("get_weather", PARIS)]
        with served(scripted, tool_call_parser="none") as chat:
            assert chat.ask(CALL, tools=[WEATHER])[0].content == CALL


def test_a_schema_that_takes_its_time_holds_nobody_up(chat, monkeypatch):
    """It compiles beside the event loop: meanwhile the server answers others."""
    compiling, others_are_answered = threading.Event(), threading.Event()
    guides = chat.scripted.pipe._builder._guides
    guide = guides.guide

    def slow(config):
        if config.response_format is not None:
            compiling.set()
            assert others_are_answered.wait(30)
        return guide(config)

    monkeypatch.setattr(guides, "guide", slow)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(chat.ask, CALL, tools=[WEATHER], tool_choice="required")
        assert compiling.wait(30)
        assert chat.ask("Hello", tools=[WEATHER])[0].content == "Hello"
        chat.scripted.say(CALL)
        others_are_answered.set()
        assert calls_of(waiting.result(30)[0]) == [("get_weather", PARIS)]
