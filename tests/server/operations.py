"""How `eldr serve` is run: operations.py PROGRAM. Starts it with the shipped model, a thread each time, on loopback.

Settings files, keys, limits, signals, the request log, calibrations read again, workers drained and taken back, and what
examples/ops says of the program.
"""

import configparser
import contextlib
import http.client
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

PROGRAM = str(pathlib.Path(sys.argv[1]).resolve())
ROOT = pathlib.Path(__file__).resolve().parents[2]
OPS = ROOT / "examples" / "ops"
TEXT = "/v1/completions"
LONG = {"prompt": "go on", "max_tokens": 900, "ignore_eos": True, "stream": True}


class Server:
    """A running server; what it says is kept."""

    def __init__(self, *args, ctx="1024"):
        line = [PROGRAM, "serve", "-v", "--port", "0", "--json", "--threads", "1", "--ctx", ctx, *args]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = []
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()
        first = self.process.stdout.readline()
        assert first, f"it did not start: {self.process.wait()} {self.said}"
        self.port = int(json.loads(first)["url"].rsplit(":", 1)[1])

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def ask(self, method, path, body=None, **headers):
        connection = self.connect()
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, reply.headers, text

    def json(self, method, path, body=None, **headers):
        status, _, text = self.ask(method, path, body, **headers)
        return status, json.loads(text)

    def stream(self, body):
        connection = self.connect()
        connection.request("POST", TEXT, json.dumps(body))
        return connection.getresponse()

    def refuses(self):
        for _ in range(3000):
            try:
                self.connect().connect()
            except ConnectionError:
                return True
            time.sleep(0.02)
        return False

    def hears(self, word):
        for _ in range(3000):
            if any(word in line for line in self.said):
                return True
            time.sleep(0.02)
        raise AssertionError(f"it did not say {word!r} but {self.said}")

    def end(self, want=0):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == want, (self.process.returncode, self.said)


@contextlib.contextmanager
def serving(*args, **more):
    server = Server(*args, **more)
    try:
        yield server
        if server.process.poll() is None:
            server.end()
    finally:
        if server.process.poll() is None:
            server.process.kill()


def run(*args):
    done = subprocess.run([PROGRAM, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def flags():
    """Every long option of serve that takes a value or is a switch."""
    code, text, _ = run("serve", "--help")
    assert code == 0
    names = re.findall(r"^\s+(?:-\w, )?--([a-z-]+)", text, re.MULTILINE)
    return [name for name in names if name not in ("help", "version")]


def a_settings_file_takes_every_flag(work):
    """A file with every option but those that ask for other files or devices is taken by --check."""
    pin = work / "pin"
    pin.write_text("a prompt's beginning")
    values = {"host": "127.0.0.1", "port": 0, "alias": "name", "api-key": ["one", "two"], "max-body": 1, "max-connections": 9,
              "max-choices": 2, "queue-timeout": 5, "request-timeout": 7, "drain-timeout": 3, "request-log": str(work / "log"),
              "log-text": True, "exact": True, "policy": "random", "ctx": 512, "slots": 2, "threads": 1,
              "cache-dir": str(work / "cache" / "deep"), "pin": str(pin)}
    known = flags()
    for name in values:
        assert name in known, f"no option --{name}"
    path = work / "eldr.toml"
    path.write_text("[serve]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    code, out, err = run("serve", "--check", "--json", "--config", str(path))
    assert code == 0, err
    assert sorted(file.name for file in work.iterdir()) == ["eldr.toml", "pin"], "a check leaves nothing behind"
    told = json.loads(out[out.index("{"):])
    assert (told["model"], told["policy"], told["slots"], told["ctx"]) == ("name", "random", 2, 512), told
    # Every other option is known to the file, too: a value of the wrong kind is refused by its name, not as unknown.
    for name in known:
        if name in ("config", "check", "json", "verbose", "quiet"):
            continue
        path.write_text(f"[serve]\n{name} = {{}}\n")
        code, _, err = run("serve", "--check", "--config", str(path))
        assert code == 2 and name in err and "unknown" not in err, (name, err)
    code, out, err = run("serve", "--check", "--config", str(OPS / "eldr.toml"), "--threads", "1")
    assert code == 0 and "would serve" in out + err, err
    path.write_text("[serve]\nprot = 1\n")
    code, _, err = run("serve", "--check", "--config", str(path))
    assert code == 2 and "prot" in err, err


def the_shipped_model_is_served_and_said(_):
    with serving() as server:
        server.hears("tiny-moe-64x4")
        assert server.json("GET", "/v1/models")[1]["data"][0]["id"] == "tiny-moe-64x4"


def keys_and_limits(work):
    (work / "keys").write_text("first\n\n  second  \n")
    with serving("--api-key-file", str(work / "keys"), "--api-key", "third", "--max-body", "1") as server:
        for key, want in [("first", 200), ("second", 200), ("third", 200), ("", 401), ("firs", 401), ("first second", 401)]:
            status, headers, text = server.ask("GET", "/v1/models", Authorization=f"Bearer {key}")
            assert status == want, (key, status)
            assert not [name for name in headers if name.lower().startswith("access-control")], "CORS is on"
        key = {"Authorization": "Bearer first"}
        assert server.ask("OPTIONS", TEXT, Origin="https://example.org", **key)[0] == 403
        status, _, text = server.ask("POST", TEXT, json.dumps({"prompt": "x" * (1 << 20)}), **key)
        assert status == 413 and json.loads(text)["error"]["message"], (status, text)
        assert server.ask("GET", "/health", **{"X-Long": "x" * (200 << 10)})[0] == 431
        assert server.ask("GET", "/health", **{f"X-{i}": "x" for i in range(100)})[0] == 431
        deep = {"type": "string"}
        for _ in range(100):
            deep = {"type": "array", "items": deep}
        for field, value in [("grammar", 'root ::= "' + "a" * (70 << 10) + '"'), ("grammar", "root ::= " + "(" * 200 + '"a"' + ")" * 200),
                             ("json_schema", deep), ("n", 1000), ("stop", ["x"] * 17), ("stop", "x" * 2000), ("logprobs", 21),
                             ("logit_bias", {str(i): 1 for i in range(1025)})]:
            status, refused = server.json("POST", TEXT, {"prompt": "x", "max_tokens": 1, field: value}, **key)
            assert status == 400 and refused["error"]["param"].startswith(field), (field, status, refused)
    (work / "keys").write_text("\n")
    code, _, err = run("serve", "--check", "--api-key-file", str(work / "keys"))
    assert code == 2 and "no key" in err, err


def no_path_of_the_host_is_told(work):
    model = work / "a-secret-folder" / "model.gguf"
    model.parent.mkdir()
    shutil.copy(ROOT / "examples/data/tiny-moe-64x4.gguf", model)
    log = work / "a-secret-folder" / "log.jsonl"
    with serving("-m", str(model), "--request-log", str(log), "--decode", "2") as server:
        answers = [server.ask("GET", path)[2] for path in ("/", "/health", "/ready", "/metrics", "/props", "/slots", "/models",
                   "/v1/models", "/v1/eldr/workers", "/v1/eldr/experts", "/v1/eldr/explain", "/nothing", "/a-secret/../x")]
        body = {"prompt": "x", "max_tokens": 4, "eldr": {"explain": True}}
        answers += [server.ask("POST", path, body)[2] for path in (TEXT, "/v1/eldr/explain", "/v1/eldr/reload", "/tokenize")]
        answers.append(server.ask("POST", TEXT, {"prompt": "x", "grammar": "root ::= ("})[2])
        for answer in answers:
            assert "a-secret-folder" not in answer and str(work) not in answer, answer


def the_request_log_has_text_only_if_asked(work):
    for asked in (False, True):
        log = work / f"log-{asked}.jsonl"
        with serving("--request-log", str(log), *(["--log-text"] if asked else [])) as server:
            server.json("POST", TEXT, {"prompt": "a very private matter", "max_tokens": 5, "user": "me"})
            server.json("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "private"}], "max_tokens": 3, "n": 2})
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(lines) == 3 and all(line["outcome"] in ("stop", "length") for line in lines), lines
        assert {"id", "policy", "worker", "route", "ttft_seconds", "prompt_tokens", "completion_tokens"} <= set(lines[0])
        assert ("private" in log.read_text()) == asked
        assert all(("prompt" in line and "text" in line) == asked for line in lines)


def sigterm_lets_running_answers_end(_):
    with serving() as server:
        stream = server.stream({**LONG, "max_tokens": 200})
        assert stream.status == 200 and stream.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        assert server.refuses(), "it still takes connections"
        text = stream.read()
        assert text.rstrip().endswith(b"data: [DONE]") and b'"error"' not in text
        assert server.process.wait(60) == 0, server.said


def past_the_limit_answers_end_with_an_error(_):
    with serving("--drain-timeout", "0") as server:
        stream = server.stream(LONG)
        assert stream.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        events = [line for line in stream.read().split(b"\n") if line.startswith(b"data: {")]
        assert json.loads(events[-1][6:])["error"]["code"] == "shutting_down", events[-1]
        assert server.process.wait(60) == 0, server.said


def a_second_sigterm_ends_at_once(_):
    with serving() as server:
        stream = server.stream({**LONG, "n": 4})
        assert stream.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        assert server.refuses()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1, server.said


def a_calibration_is_read_again(work):
    path = work / "c.safetensors"
    data = ROOT / "examples/data/task.calibration.jsonl"
    for seed in ("1", "2"):
        code, _, err = run("calibrate", "--prompts", str(data), "--requests", "8", "--workers", "2", "--max-tokens", "2", "--no-verdict",
                           "--seed", seed, "--threads", "1", "-o", str(work / f"{seed}.safetensors"))
        assert code == 0, err
    shutil.copy(work / "1.safetensors", path)
    with serving("--calibration", str(path), "--policy", "locality_band", "--decode", "2") as server:
        shutil.copy(work / "2.safetensors", path)
        server.process.send_signal(signal.SIGHUP)
        server.hears("requests are routed by")
        path.write_bytes(b"no calibration")
        server.process.send_signal(signal.SIGHUP)
        server.hears("nothing was changed")
        status, refused = server.json("POST", "/v1/eldr/reload")
        assert status == 409 and str(work) not in json.dumps(refused), refused
        shutil.copy(work / "1.safetensors", path)
        assert server.json("POST", "/v1/eldr/reload")[0] == 200
        status, told = server.json("POST", "/v1/eldr/explain", {"prompt": "def f("})
        assert told["choices"][0]["route"]["similarity"] is not None and told["choices"][0]["experts"]["layers"], told
    with serving("--decode", "2", "--policy", "least_loaded") as server:
        assert server.json("POST", "/v1/eldr/reload")[0] == 409
        server.process.send_signal(signal.SIGHUP)
        server.hears("nothing to read again: the server was started without a calibration")
        assert server.json("GET", "/health")[0] == 200


def workers_are_drained_and_taken_back(_):
    with serving("--decode", "2", "--policy", "round_robin") as server:
        explain = {"prompt": "x", "max_tokens": 3, "eldr": {"explain": True}}
        stream = server.stream(LONG)
        assert stream.readline().startswith(b"data: ")
        held = next(worker["id"] for worker in server.json("GET", "/v1/eldr/workers")[1]["workers"] if worker["n_inflight"])
        assert server.json("POST", f"/v1/eldr/workers/{held}/drain")[0] == 200
        used = {server.json("POST", TEXT, explain)[1]["eldr"][0]["worker"] for _ in range(4)}
        assert used <= {1 - held, None}, used
        assert server.json("POST", f"/v1/eldr/workers/{1 - held}/drain")[0] == 400, "the last one"
        assert stream.read().rstrip().endswith(b"data: [DONE]"), "a drained worker finishes what it has"
        assert server.json("POST", f"/v1/eldr/workers/{held}/resume")[0] == 200
        used = {server.json("POST", TEXT, {**explain, "ignore_eos": True})[1]["eldr"][0]["worker"] for _ in range(4)}
        assert used == {0, 1}, used


def policies_are_asked_for(_):
    with serving("--decode", "2") as server:
        own = server.json("GET", "/v1/eldr/workers")[1]["policy"]
        for policy, want in [("auto", own), ("round_robin", "round_robin"), ("random", "random"), (own, own)]:
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "eldr": {"explain": True, "policy": policy}}
            assert server.json("POST", TEXT, body)[1]["eldr"][0]["policy"] == want
        body = {"prompt": "x", "max_tokens": 3, "eldr": {"policy": "locality_band"}}
        status, refused = server.json("POST", TEXT, body)
        assert status == 400 and refused["error"]["param"] == "eldr.policy", refused
        told = server.json("POST", "/v1/eldr/explain", {"prompt": "def f(", "eldr": {"policy": "round_robin"}})[1]
        assert told["choices"][0]["policy"] == "round_robin" and told["choices"][0]["experts"]["of"] == 64, told
        assert 'policy="round_robin"' in server.ask("GET", "/metrics")[2]


def fields_of_llama_server_are_heard(_):
    with serving() as server:
        ask = {"prompt": "The court held that the agreement was void. " * 8, "max_tokens": 4, "temperature": 0}
        cached = [server.json("POST", TEXT, {**ask, **more})[1]["timings"]["cache_n"]
                  for more in ({}, {}, {"cache_prompt": False}, {"cache_prompt": True})]
        assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0, cached
        endless = {"prompt": "x = 1\n", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "n_probs": 1}
        choice = server.json("POST", TEXT, endless)[1]["choices"][0]
        assert choice["finish_reason"] == "length" and len(choice["logprobs"]["tokens"]) == 300, choice
        ends = {token for token in choice["logprobs"]["tokens"] if token.startswith("<|")}
        assert not ends, ends
        status, refused = server.json("POST", TEXT, {**ask, "dry_multiplier": 0.8})
        assert status == 400 and refused["error"]["param"] == "dry_multiplier", refused


def times_without_end_are_taken(_):
    most = str(2**64 - 1)
    with serving("--request-timeout", most, "--queue-timeout", most, "--drain-timeout", most) as server:
        assert server.json("POST", TEXT, {"prompt": "x", "max_tokens": 2})[0] == 200


def what_examples_say_is_so(_):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(OPS / "eldr.service")
    known = flags()
    for line in (unit["Service"]["ExecStart"], unit["Service"]["ExecStartPre"]):
        for name in re.findall(r"--([a-z-]+)", line):
            assert name in known, f"eldr.service names --{name}"
    analyze = shutil.which("systemd-analyze")
    if analyze:
        text = (OPS / "eldr.service").read_text().replace("/usr/local/bin/eldr", PROGRAM)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "eldr.service"
            path.write_text(text)
            done = subprocess.run([analyze, "verify", "--man=no", str(path)], capture_output=True, text=True)
        assert "eldr.service" not in done.stderr, done.stderr
    board = json.loads((OPS / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    with serving("--decode", "2") as server:
        server.json("POST", TEXT, {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        server.json("POST", TEXT, {"prompt": "x", "temperature": -1})
        metrics = server.ask("GET", "/metrics")[2]
        names = set(re.findall(r"^([a-zA-Z_:]+)[ {]", metrics, re.MULTILINE))
        names |= set(re.findall(r"^# TYPE (\S+)", metrics, re.MULTILINE))
    for query in queries:
        used = re.findall(r"\b(?:eldr_|llamacpp:)\w+", query)
        assert used and all(name in names for name in used), f"no such metric: {query}"


def main():
    for test in (a_settings_file_takes_every_flag, the_shipped_model_is_served_and_said, keys_and_limits, no_path_of_the_host_is_told,
                 the_request_log_has_text_only_if_asked, sigterm_lets_running_answers_end, past_the_limit_answers_end_with_an_error,
                 a_second_sigterm_ends_at_once, a_calibration_is_read_again, workers_are_drained_and_taken_back,
                 policies_are_asked_for, fields_of_llama_server_are_heard, times_without_end_are_taken, what_examples_say_is_so):
        with tempfile.TemporaryDirectory() as work:
            started = time.monotonic()
            test(pathlib.Path(work))
            print(f"operations: {test.__name__}: passed, {time.monotonic() - started:.1f} s", flush=True)


main()
