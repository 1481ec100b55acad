"""What clients must not be able to do to a running `eldr serve`: abuse.py URL PID [SECONDS].

A thousand connections that say nothing, one that reads slowly, some that leave in mid-stream, and wrong bodies for SECONDS
(60). No answer may be a server error, every slot must be free at the end, /health must answer throughout and the memory of
process PID must stay flat. Only loopback. PID 0 leaves memory out.
"""

import http.client
import json
import random
import socket
import sys
import threading
import time
import urllib.parse

url = urllib.parse.urlparse(sys.argv[1])
pid = int(sys.argv[2])
seconds = min(float(sys.argv[3]), 600) if len(sys.argv) > 3 else 60
assert url.hostname in ("127.0.0.1", "localhost", "::1"), "only loopback"
draw = random.Random(5)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi <|eos|> there"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "array", "items": {"type": "number"}}}}
GOOD = [
    (TEXT, {"prompt": "def f(", "max_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "n": 2,
            "seed": 1, "stop": ["a", "b"], "logprobs": 2, "logit_bias": {"5": -1}, "stream": False}),
    (TEXT, {"prompt": [[1, 2, 3], [4]], "max_tokens": 1, "repeat_penalty": 1.1, "presence_penalty": 1, "user": "u"}),
    (TEXT, {"prompt": "x", "max_tokens": 2, "grammar": 'root ::= "a" [b-d]*', "stream": True,
            "stream_options": {"include_usage": True}, "eldr": {"explain": True, "priority": "high", "domain": "code", "policy": "random"}}),
    (CHAT, {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 3, "reasoning_format": "none"}),
    (CHAT, {"messages": HI, "max_tokens": 2, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": HI, "max_tokens": 3, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {
        "name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "4"}], "max_tokens": 1}),
    ("/tokenize", {"content": "a<|eos|>b", "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/eldr/explain", {"prompt": "where"}),
]
ODD = [None, True, 0, -1, 1, 2**63, 2**64, 1e308, -1e-9, 0.5, "", "x", "\ud83d\ude00", "\0", "\ufdd0", "<|eos|>", [], {}, [[]], [{}],
       {"type": "object"}, "root ::= root", "root ::= (", {"$ref": "#"}, "x" * 5000, [1] * 5000, ["a"] * 30]


def connect():
    return http.client.HTTPConnection(url.hostname, url.port, timeout=120)


def ask(method, path, body=None):
    connection = connect()
    connection.request(method, path, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, text


def wrong(value):
    """`value` with one place in it changed, or more."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        value = dict(value)
        key = draw.choice(list(value))
        match draw.randrange(6):
            case 0:
                del value[key]
            case 1:
                value[key] = draw.choice(ODD)
            case 2:
                value[draw.choice(["eldr", "n", "stop", "seed", "max_tokens", "grammar", "json_schema", "tools"])] = draw.choice(ODD)
            case _:
                value[key] = wrong(value[key])
        return value
    if isinstance(value, list) and value and draw.random() < 0.8:
        value = list(value)
        at = draw.randrange(len(value))
        value[at] = wrong(value[at])
        return value
    return draw.choice(ODD)


def bytes_of(body):
    data = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    match draw.randrange(12):
        case 0:
            data = data[:draw.randrange(len(data) + 1)]
        case 1:
            at = draw.randrange(len(data))
            data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1:]
        case 2:
            data = draw.choice([b"[" * 5000, b'{"a":' * 5000, data + data, b"\xff\xfe", b"nul", b'{"prompt":1e999}'])
    return data


def rss():
    if not pid:
        return 0
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def fuzz(until):
    seen = {}
    while time.monotonic() < until:
        path, body = draw.choice(GOOD)
        for _ in range(draw.randrange(3)):
            body = wrong(body)
            if isinstance(body, dict) and path in (TEXT, CHAT) and not isinstance(body.get("max_tokens"), int):
                body.setdefault("max_tokens", 2)
        data = bytes_of(body)
        status, text = ask("POST", path, data)
        seen[status] = seen.get(status, 0) + 1
        assert status < 500, f"{status} for {path} {data[:2000]!r}: {text[:500]!r}"
        if status >= 400:
            assert json.loads(text)["error"]["message"], f"no reason for {path} {data[:2000]!r}"
    return seen


def leave(n):
    for _ in range(n):
        connection = connect()
        connection.request("POST", TEXT, json.dumps({"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "stream": True}))
        connection.getresponse().read(200)
        connection.sock.close() if connection.sock else None
        connection.close()


def wait_idle(limit=60):
    until = time.monotonic() + limit
    while time.monotonic() < until:
        doc = json.loads(ask("GET", "/v1/eldr/workers")[1])
        if doc["n_active"] == 0 and all(worker["n_inflight"] == 0 for worker in doc["workers"]):
            return
        time.sleep(0.1)
    raise AssertionError(f"requests that do not end: {doc}")


def main():
    health, faults, over = [], [], threading.Event()

    def watch():
        try:
            while not over.is_set():
                began = time.perf_counter()
                assert ask("GET", "/health")[0] == 200, "/health did not answer well"
                health.append(time.perf_counter() - began)
                time.sleep(0.02)
        except (AssertionError, OSError, http.client.HTTPException) as fault:
            faults.append(fault)

    want = ask("POST", TEXT, json.dumps({"prompt": "def f(", "max_tokens": 8, "temperature": 0}))
    assert want[0] == 200, want
    watcher = threading.Thread(target=watch)
    watcher.start()

    silent = [socket.create_connection((url.hostname, url.port)) for _ in range(1000)]
    began = time.perf_counter()
    assert ask("POST", TEXT, json.dumps({"prompt": "x", "max_tokens": 2}))[0] == 200
    print(f"1000 silent connections: an answer of 2 tokens took {time.perf_counter() - began:.3f} s")
    for connection in silent:
        connection.close()

    slow = connect()
    slow.request("POST", TEXT, json.dumps({"prompt": "slow", "max_tokens": 300, "ignore_eos": True, "stream": True}))
    reply = slow.getresponse()
    reply.read(64)
    began = time.perf_counter()
    for _ in range(5):
        assert ask("POST", TEXT, json.dumps({"prompt": "quick", "max_tokens": 4}))[0] == 200
    print(f"beside a slow reader: 5 answers of 4 tokens took {time.perf_counter() - began:.2f} s")
    assert reply.read().rstrip().endswith(b"data: [DONE]"), "the slow reader's stream is not whole"

    leave(20)
    wait_idle()
    print("20 streams were left: every slot is free")

    until = time.monotonic() + seconds
    first = fuzz(min(until, time.monotonic() + seconds / 4))
    warm = rss()
    seen = fuzz(until)
    for status, n in first.items():
        seen[status] = seen.get(status, 0) + n
    wait_idle()
    grown = rss() - warm
    over.set()
    watcher.join()
    assert not faults, faults[0]
    health.sort()
    again = ask("POST", TEXT, json.dumps({"prompt": "def f(", "max_tokens": 8, "temperature": 0}))
    assert json.loads(again[1])["choices"] == json.loads(want[1])["choices"], "it does not say what it said before"
    print(f"fuzzed for {seconds:.0f} s, answers by status: {dict(sorted(seen.items()))}")
    print(f"resident memory: {warm:.1f} MiB when warm, {grown:+.1f} MiB at the end")
    print(f"/health: p50 {health[len(health) // 2] * 1e3:.1f} ms, p99 {health[int(len(health) * 0.99)] * 1e3:.1f} ms of {len(health)}")
    assert grown < 32, "memory grows"


main()
