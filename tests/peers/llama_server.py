"""The same requests to llama-server and to `eldr serve`: llama_server.py THEIR_URL OUR_URL KEY [DOC].

Both must serve the same model on the CPU, flash attention off, one thread, with the key KEY. Greedy texts must be equal; status
codes, fields and errors are put side by side. Every difference must have its reason below. DOC gets the table. Only loopback.
"""

import http.client
import json
import re
import sys
import urllib.parse

THEIRS, OURS, KEY = sys.argv[1:4]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["def read_lines(path):", "The court held that", "The patient was given", "Let x be a prime number.", "Once upon a time",
           "import numpy as np\n", "Le tribunal", "1 2 3 4"]
HI = [{"role": "user", "content": "Explain what a hash map is."}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 1, "maximum": 3}},
          "required": ["kind", "n"], "additionalProperties": False}
GREEDY = {"temperature": 0, "max_tokens": 24, "cache_prompt": False}


def greedy(prompt, **more):
    return {"prompt": prompt, **GREEDY, **more}


def chat(**more):
    return {"messages": HI, **GREEDY, **more}


# Name, method, path, body, whether the texts must be equal.
CASES = [
    *[(f"completion {i + 1}", "POST", TEXT, greedy(prompt), True) for i, prompt in enumerate(PROMPTS)],
    ("completion, streamed", "POST", TEXT, greedy(PROMPTS[0], stream=True, stream_options={"include_usage": True}), True),
    ("completion, stop", "POST", TEXT, greedy(PROMPTS[1], stop=[" the", "of"]), True),
    ("completion, logprobs", "POST", TEXT, greedy(PROMPTS[0], logprobs=2), True),
    ("completion, logit_bias", "POST", TEXT, greedy(PROMPTS[0], logit_bias={"10": -100, "12": -100}), True),
    ("completion, penalties", "POST", TEXT, greedy("Zq", frequency_penalty=1.0, presence_penalty=0.5), True),
    ("completion, penalties of a word in the prompt", "POST", TEXT, greedy(PROMPTS[0], frequency_penalty=1.0), True),
    ("completion, grammar", "POST", TEXT, greedy(PROMPTS[0], grammar='root ::= "yes" | "no"'), True),
    ("completion, tokens", "POST", TEXT, greedy([5, 6, 7]), True),
    ("completion, no limit and any seed: -1", "POST", TEXT, greedy(PROMPTS[0], max_tokens=-1, seed=-1, top_k=-1, stop=["\n"]), True),
    ("completion, ignore_eos", "POST", TEXT, greedy(PROMPTS[0], ignore_eos=True, max_tokens=200), True),
    ("completion, n_probs", "POST", TEXT, greedy(PROMPTS[0], n_probs=2), True),
    ("completion, samplers", "POST", TEXT, greedy(PROMPTS[0], samplers=["top_k", "temperature"], n_cmpl=2), True),
    ("completion, streamed, timings_per_token", "POST", TEXT, greedy(PROMPTS[0], stream=True, timings_per_token=True), True),
    ("completion, mirostat", "POST", TEXT, greedy(PROMPTS[0], mirostat=2), False),
    ("chat", "POST", CHAT, chat(), True),
    ("chat, continued", "POST", CHAT, {**chat(), "messages": [*HI, {"role": "assistant", "content": "A"}], "continue_final_message": True}, False),
    ("chat, streamed", "POST", CHAT, chat(stream=True, stream_options={"include_usage": True}), True),
    ("chat, logprobs", "POST", CHAT, chat(logprobs=True, top_logprobs=2), True),
    ("chat, JSON schema", "POST", CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}, max_tokens=60), True),
    ("chat, tool", "POST", CHAT, chat(tools=[WEATHER], tool_choice="required", max_tokens=100), False),
    ("chat, n = 2", "POST", CHAT, chat(n=2), True),
    ("tokenize", "POST", "/tokenize", {"content": "hash map"}, True),
    ("tokenize, pieces", "POST", "/tokenize", {"content": "hash map", "with_pieces": True}, True),
    ("detokenize", "POST", "/detokenize", {"tokens": [40, 41, 42]}, True),
    ("models", "GET", "/v1/models", None, False),
    ("health", "GET", "/health", None, True),
    ("props", "GET", "/props", None, False),
    ("slots", "GET", "/slots", None, False),
    ("metrics", "GET", "/metrics", None, False),
    ("no such path", "GET", "/v1/nothing", None, False),
    ("wrong method", "GET", TEXT, None, False),
    ("no JSON", "POST", TEXT, b'{"prompt": ', False),
    ("no object", "POST", TEXT, b"[]", False),
    ("no prompt", "POST", TEXT, {"max_tokens": 1}, False),
    ("no messages", "POST", CHAT, {"max_tokens": 1}, False),
    ("empty messages", "POST", CHAT, {"messages": [], "max_tokens": 1}, False),
    ("wrong role", "POST", CHAT, {"messages": [{"role": "king", "content": "hi"}], "max_tokens": 1}, False),
    ("temperature is a word", "POST", TEXT, {"prompt": "x", "temperature": "hot", "max_tokens": 1}, False),
    ("temperature below 0", "POST", TEXT, {"prompt": "x", "temperature": -1, "max_tokens": 1}, False),
    ("max_tokens below -1", "POST", TEXT, {"prompt": "x", "max_tokens": -2}, False),
    ("max_tokens is a word", "POST", TEXT, {"prompt": "x", "max_tokens": "many"}, False),
    ("wrong grammar", "POST", TEXT, {"prompt": "x", "grammar": "root ::= (", "max_tokens": 1}, False),
    ("wrong schema", "POST", TEXT, {"prompt": "x", "json_schema": {"type": "thing"}, "max_tokens": 1}, False),
    ("wrong response_format", "POST", CHAT, chat(response_format={"type": "xml"}), False),
    ("token that is not", "POST", TEXT, {"prompt": [999999], "max_tokens": 1}, False),
    ("too long", "POST", TEXT, {"prompt": "word " * 6000, "max_tokens": 1}, False),
    ("wrong key", "GET", "/v1/models", "stranger", False),
]

# Why: the cases, kinds of difference and items (regular expressions of the whole) that it explains. The first that fits counts.
REASONS = {
    ("completion, penalties of a word in the prompt", "text", ".*"):
        "OpenAI's penalties count the tokens generated so far; llama-server's count the prompt's last tokens, too. With a prompt "
        "that shares no token with the answer the texts are equal (the row above)",
    ("chat, JSON schema", "text", ".*"):
        "each makes its own grammar of a schema; eldr's leaves little room for white space, in which small models lose themselves",
    ("completion, logprobs|completion, n_probs", "theirs|ours", r"choices\[\]\.logprobs.*"):
        "`/v1/completions` answers in the shape that OpenAI gives this endpoint, llama-server in that of chats",
    ("chat.*", "theirs", r".*top_logprobs\[\]\.id|.*content\[\]\.id"): "OpenAI's shape has no token numbers; `/tokenize` tells them",
    (".*", "ours", r"(\[\]\.)?choices\[\]\.logprobs"): "eldr says null where OpenAI does; llama-server leaves the field out",
    (".*", "theirs|ours", r"\[\]\.choices\[\]\.delta.*"): "eldr opens a choice with empty content, as OpenAI does; llama-server with null",
    ("chat, tool", "ours", r"choices\[\]\.message\.tool_calls.*"):
        "eldr holds the model to a call when `tool_choice` is `required`; llama-server does so only for templates whose calls it knows",
    ("models", "theirs", r"models.*"): "`models` is Ollama's list; eldr answers with OpenAI's",
    ("models", "theirs", r"data\[\]\.(aliases|architecture|tags|meta).*"): "eldr serves one model, text only, under one name",
    ("props", "theirs", r"model_path"): "eldr tells no path of the host",
    ("props|slots", "theirs", r"(default_generation_settings|\[\])\.params.*"):
        "eldr's samplers are those that every policy and worker gives the same text with; others are not there to be told of",
    ("props", "theirs", ".*"): "what eldr does not have: media, a web UI with settings, sleeping",
    ("slots", "theirs", ".*"): "what the slot's last request did; eldr keeps that by request, in `/v1/eldr/workers`",
    ("props|slots", "ours", ".*"): "where and why requests run: eldr's own",
    ("metrics", "theirs", ".*"): "eldr has several workers and no speculative decoding; its own names count batches and slots by worker",
    ("metrics", "ours", ".*"): "eldr's own: routing, hand-offs, caches, workers, and histograms of times",
    (".*", "error\\.code", r"\d+ / .*"): "OpenAI's `code` is a word or null; llama-server repeats the HTTP status",
    (".*", "error ours", "param"): "OpenAI's errors name the field; llama-server's do not",
    ("no such path|wrong method", "error\\.type", ".*"): "OpenAI's word for it",
    ("wrong method", "status", ".*"): "the path is there, the method is not",
    ("too long", "error\\.type", ".*"): "OpenAI's type, with its code `context_length_exceeded`",
    ("too long", "error theirs", ".*"): "the numbers are in eldr's sentence",
    ("completion, mirostat|chat, continued", "status|error ours", ".*"):
        "what would change the answer and eldr does not do is refused, with what to do instead (`examples/ops/README.md` lists it)",
    ("empty messages|wrong role|temperature below 0", "status|error ours", ".*"):
        "OpenAI refuses it, and so does eldr; llama-server makes something of it",
}


def ask(url, method, path, body):
    url = urllib.parse.urlparse(url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
    key = KEY
    if isinstance(body, str):
        key, body = body, None
    data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
    connection.request(method, path, data, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    reply = connection.getresponse()
    raw = reply.read().decode()
    connection.close()
    if raw.startswith("data: "):
        events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", raw[-200:]
        return reply.status, [json.loads(event) for event in events[:-1]]
    try:
        return reply.status, json.loads(raw)
    except ValueError:
        return reply.status, raw


def fields(value, path=""):
    """The paths of what is in an answer; lists count as one of their entries."""
    if isinstance(value, dict) and path.endswith("top_logprobs[]") and "token" not in value:
        return {path}  # Its names are texts.
    if isinstance(value, dict):
        return set().union(*(fields(part, f"{path}.{name}".lstrip(".")) for name, part in value.items()), {path} - {""})
    if isinstance(value, list):
        return set().union(*(fields(part, f"{path}[]") for part in value), {path})
    if isinstance(value, str) and not path:
        return set(re.findall(r"^# TYPE (\S+)", value, re.MULTILINE))
    return {path}


def texts(answer):
    """What was generated, or said to a plain question."""
    if isinstance(answer, dict) and "choices" not in answer:
        return [json.dumps(answer, sort_keys=True)]
    found = {}
    for part in answer if isinstance(answer, list) else [answer]:
        for choice in part["choices"]:
            message = choice.get("message") or choice.get("delta") or choice
            text = message.get("text") or message.get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[index] for index in sorted(found)]


def error(answer):
    return answer.get("error") if isinstance(answer, dict) else None


def reason(name, what, item):
    """Why `item`, one of the fields only theirs or ours has or a pair of codes, differs."""
    for (cases, kinds, items), why in REASONS.items():
        if re.fullmatch(cases, name) and re.fullmatch(kinds, what) and re.fullmatch(items, item):
            return why
    return None


def compare(name, method, path, body, must_equal):
    """The cells of a row, the differences with their reasons, and what has none."""
    (status, theirs), (our_status, ours) = ask(THEIRS, method, path, body), ask(OURS, method, path, body)
    differences = []
    if status != our_status:
        differences.append(("status", f"{status} / {our_status}"))
    said, our_said = error(theirs), error(ours)
    equal = "-"
    if said and our_said:
        for key in ("type", "code"):
            if said.get(key) != our_said.get(key):
                differences.append((f"error.{key}", f"{said.get(key)} / {our_said.get(key)}"))
    elif not said and not our_said:
        if must_equal:
            same = texts(theirs) == texts(ours)
            equal = "equal" if same else "different"
            if not same:
                differences.append(("text", f"{texts(theirs)} / {texts(ours)}"))
        differences += [("theirs", field) for field in sorted(fields(theirs) - fields(ours))]
        differences += [("ours", field) for field in sorted(fields(ours) - fields(theirs))]
    if said or our_said:
        differences += [("error theirs", field) for field in sorted(fields(said or {}) - fields(our_said or {}))]
        differences += [("error ours", field) for field in sorted(fields(our_said or {}) - fields(said or {}))]
    row = [name, f"`{method} {path}`", str(status), str(our_status), equal]
    explained = [(what, item, reason(name, what, item)) for what, item in differences]
    return row, explained


def tops(items):
    """Without the parts of what is listed as a whole; of many in one place, how many."""
    items = [item for item in items if not any(item.startswith((f"{other}.", f"{other}[")) for other in items)]
    places = {}
    for item in items:
        places.setdefault(item.rpartition(".")[0] if "/" not in item else "", []).append(item)
    short = []
    for place, those in places.items():
        short += [f"`{place}.*` ({len(those)} fields)"] if place and len(those) > 6 else those
    return short


def main():
    rows, why, unexplained = [], {}, []
    for case in CASES:
        row, differences = compare(*case)
        for what, item, because in differences:
            if because is None:
                unexplained.append((case[0], what, item))
            else:
                why.setdefault((because, what), {}).setdefault(item, []).append(case[0])
        rows.append(row)
    lines = ["| request | path | llama-server | eldr | greedy text |", "| --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "## What differs, and why", "", "| what | where | why |", "| --- | --- | --- |"]
    kinds = {"theirs": "only llama-server has", "ours": "only eldr has", "error theirs": "only llama-server's error has",
             "error ours": "only eldr's error has"}
    for (because, what), items in why.items():
        named = ", ".join(item if item.endswith(")") else f"`{item}`" for item in tops(items))
        cases = list(dict.fromkeys(case for cases in items.values() for case in cases))
        where = ", ".join(cases) if len(cases) <= 4 else f"{', '.join(cases[:3])} and {len(cases) - 3} more"
        named = named.replace("\\n", " ").replace("|", "\\|")
        said = f"{kinds[what]} {named}" if what in kinds else f"{what} (llama-server's / eldr's): {named}"
        lines.append(f"| {said} | {where} | {because} |")
    print("\n".join(lines))
    if len(sys.argv) > 4:
        with open(sys.argv[4], "w", encoding="utf-8") as doc:
            doc.write(HEAD + "\n".join(lines) + "\n")
    n_equal = sum(row[4] == "equal" for row in rows)
    print(f"\n{n_equal} of {sum(row[4] != '-' for row in rows)} texts equal, {sum(len(x) for x in why.values())} differences with a reason")
    for name, what, item in unexplained:
        print(f"NO REASON: {name}: {what}: {item}")
    sys.exit(1 if unexplained else 0)


HEAD = """# What differs from llama-server

The same requests to llama-server (llama.cpp 0.6.0, the version eldr is built with) and to `eldr serve`, both with the shipped
model, one thread, no flash attention. This file is what `tests/peers/llama_server.sh` writes; a difference without a reason in
`tests/peers/llama_server.py` makes it fail.

"""

main()
