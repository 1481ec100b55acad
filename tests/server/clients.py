"""What the official openai package and LangChain get from a running `eldr serve`: clients.py URL KEY."""

import json
import sys
import threading
import time
import urllib.request
from importlib.metadata import version

import openai
from langchain_openai import ChatOpenAI
from openai import OpenAI

URL, KEY = sys.argv[1:3]
client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
MODEL = client.models.list().data[0].id
HI = [{"role": "user", "content": "Explain what a hash map is."}]


def chat():
    reply = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=12, seed=1)
    again = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=12, seed=1)
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert choice.message.content == again.choices[0].message.content, "a seed fixes the text"


def stream():
    whole = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=20, seed=2, temperature=0)
    parts = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=20, seed=2, temperature=0, stream=True,
        stream_options={"include_usage": True})
    text, usage = "", None
    for part in parts:
        usage = part.usage or usage
        for choice in part.choices:
            text += choice.delta.content or ""
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens


def completions():
    reply = client.completions.create(model=MODEL, prompt=["def f(", "The court"], n=2, max_tokens=6, seed=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


def stop():
    free = client.completions.create(model=MODEL, prompt="def f(", max_tokens=24, temperature=0).choices[0].text
    word = free[8:11]
    held = client.completions.create(model=MODEL, prompt="def f(", max_tokens=24, temperature=0, stop=word)
    assert held.choices[0].text == free[:free.index(word)] and held.choices[0].finish_reason == "stop"


def logprobs():
    reply = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == reply.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
    old = client.completions.create(model=MODEL, prompt="def f(", max_tokens=4, temperature=0, logprobs=2)
    assert len(old.choices[0].logprobs.token_logprobs) == 4


def logit_bias():
    free = client.completions.create(model=MODEL, prompt="def f(", max_tokens=1, temperature=0, logprobs=0)
    first = free.choices[0].logprobs.tokens[0]
    ids = json.load(post("/tokenize", {"content": first}))["tokens"]
    held = client.completions.create(
        model=MODEL, prompt="def f(", max_tokens=1, temperature=0, logit_bias={str(i): -100 for i in ids})
    assert held.choices[0].text != first


def json_schema():
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 12}, "kind": {"enum": ["a", "b"]},
                       "pages": {"type": "array", "items": {"type": "integer", "minimum": 1, "exclusiveMaximum": 1200}, "minItems": 1,
                                 "maxItems": 2}},
        "required": ["title", "kind", "pages"], "additionalProperties": False,
    }
    for seed in range(3):
        reply = client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=200, seed=seed, temperature=1,
            response_format={"type": "json_schema", "json_schema": {"name": "book", "strict": True, "schema": schema}})
        book = json.loads(reply.choices[0].message.content)
        assert list(book) == ["title", "kind", "pages"], book
        assert all(1 <= page < 1200 for page in book["pages"]), book
        assert book["kind"] in ("a", "b") and 1 <= len(book["pages"]) <= 2 and reply.choices[0].finish_reason == "stop"
    reply = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=8, extra_body={"grammar": 'root ::= "yes" | "no"'})
    assert reply.choices[0].message.content in ("yes", "no")


def tools():
    weather = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}}}
    ask = dict(model=MODEL, messages=HI, max_tokens=100, seed=1, tools=[weather], tool_choice="required")
    call = client.chat.completions.create(**ask).choices[0]
    assert call.finish_reason == "tool_calls" and call.message.content is None
    function = call.message.tool_calls[0].function
    assert function.name == "weather" and json.loads(function.arguments)["city"] in ("Oslo", "Rome")
    name, arguments = "", ""
    for part in client.chat.completions.create(**ask, stream=True):
        for tool in part.choices[0].delta.tool_calls or []:
            name, arguments = name + tool.function.name, arguments + tool.function.arguments
    assert (name, json.loads(arguments)) == ("weather", json.loads(function.arguments))
    answered = HI + [call.message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": call.message.tool_calls[0].id, "content": "rain"}]
    assert client.chat.completions.create(model=MODEL, messages=answered, max_tokens=4).choices[0].message


def errors():
    expect(openai.BadRequestError, "temperature", lambda: client.completions.create(model=MODEL, prompt="x", temperature=-3))
    expect(openai.BadRequestError, "messages", lambda: client.chat.completions.create(model=MODEL, messages=[]))
    long = "word " * 20000
    error = expect(openai.BadRequestError, "prompt", lambda: client.completions.create(model=MODEL, prompt=long))
    assert error.code == "context_length_exceeded"
    stranger = OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    expect(openai.AuthenticationError, None, lambda: stranger.models.list())


def timeouts():
    hasty = client.with_options(timeout=0.05)
    expect(openai.APITimeoutError, None, lambda: hasty.completions.create(model=MODEL, prompt="x", max_tokens=900,
                                                                          extra_body={"ignore_eos": True}))
    wait_idle()


def cancel():
    parts = client.completions.create(model=MODEL, prompt="x", max_tokens=900, stream=True,
                                      extra_body={"ignore_eos": True})
    next(iter(parts))
    parts.close()
    wait_idle()


def special_tokens():
    eos = json.load(post("/tokenize", {"content": "<|eos|>"}))["tokens"]
    plain = json.load(post("/tokenize", {"content": "<|eos|>", "parse_special": False}))["tokens"]
    assert len(eos) == 1 and len(plain) > 4

    def n(text):
        said = [{"role": "user", "content": text}]
        return client.chat.completions.create(model=MODEL, messages=said, max_tokens=1).usage.prompt_tokens

    # Texts are cut into tokens where a special one is written out, so borders may differ by a token or two.
    assert n("a<|eos|>") >= n("a") + len(plain) - 2, "a user can say a special token"


def priority():
    said = {"eldr": {"priority": "high", "explain": True}}
    reply = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=3, extra_body=said)
    assert reply.choices[0].finish_reason in ("stop", "length")
    expect(openai.BadRequestError, "eldr.priority", lambda: client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=3, extra_body={"eldr": {"priority": "low"}}))


def concurrent():
    want = {i: client.completions.create(model=MODEL, prompt=f"Item {i}:", max_tokens=8, temperature=0).usage.completion_tokens
            for i in range(8)}
    got = {}

    def one(i):
        got[i] = client.completions.create(model=MODEL, prompt=f"Item {i}:", max_tokens=8, temperature=0).usage.completion_tokens

    threads = [threading.Thread(target=one, args=(i,)) for i in want]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert got == want


def langchain():
    model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=20, max_retries=0, timeout=300)
    reply = model.invoke("Explain what a hash map is.")
    assert reply.content and reply.usage_metadata["output_tokens"] <= 20
    assert reply.content == client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=20, temperature=0).choices[0].message.content
    parts = list(model.stream("Explain what a hash map is.", stream_usage=True))
    assert "".join(part.content for part in parts) == reply.content
    assert any(part.usage_metadata for part in parts), "a stream without its usage"
    weather = {"name": "weather", "description": "The weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}}
    long = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=200, max_retries=0, timeout=300)
    call = long.bind_tools([weather], tool_choice="required").invoke("How is the weather in Rome?").tool_calls[0]
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")
    schema = {"title": "kind", "type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"],
              "additionalProperties": False}
    assert long.with_structured_output(schema, method="json_schema").invoke("Which kind?")["kind"] in ("a", "b")


def eldr_fields():
    """A policy for one request, its reasons, and several answers of which each says how it was routed."""
    said = {"eldr": {"policy": "round_robin", "explain": True}, "ignore_eos": True}
    reply = client.completions.create(model=MODEL, prompt="def f(", n=2, max_tokens=4, seed=1, extra_body=said)
    assert [route["policy"] for route in reply.eldr] == ["round_robin"] * 2 and reply.eldr[0]["route"]["reason"] == "turn"
    again = client.completions.create(model=MODEL, prompt="def f(", n=2, max_tokens=4, seed=1, extra_body={"ignore_eos": True})
    assert [choice.text for choice in reply.choices] == [choice.text for choice in again.choices], "a policy changes no text"
    expect(openai.BadRequestError, "eldr.policy", lambda: client.completions.create(
        model=MODEL, prompt="x", extra_body={"eldr": {"policy": "fastest"}}))


def expect(kind, param, action):
    try:
        action()
    except kind as error:
        assert param is None or error.param == param, (error, param)
        return error
    raise AssertionError(f"{kind.__name__} did not come")


def post(path, body):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(URL + path, json.dumps(body).encode(), headers))


def wait_idle():
    for _ in range(1200):
        request = urllib.request.Request(URL + "/v1/eldr/workers", headers={"Authorization": f"Bearer {KEY}"})
        if json.load(urllib.request.urlopen(request))["n_active"] == 0:
            return
        time.sleep(0.1)
    raise AssertionError("a request that nobody reads is still running")


for check in (chat, stream, completions, stop, logprobs, logit_bias, json_schema, tools, errors, timeouts, cancel, special_tokens,
              priority, concurrent, langchain, eldr_fields):
    check()
    print(f"openai {openai.__version__}, langchain-openai {version('langchain-openai')}: {check.__name__} passed")
