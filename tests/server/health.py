"""How fast a running `eldr serve` says how it is while it prefills long prompts: health.py URL [SECONDS] [CHARACTERS].

Keeps eight long prompts on their way for SECONDS (10) and asks the control plane all the while. Prints the times; each
should stay below 50 ms at p99. Only loopback.
"""

import http.client
import json
import sys
import threading
import time
import urllib.parse

url = urllib.parse.urlparse(sys.argv[1])
seconds = min(float(sys.argv[2]), 120) if len(sys.argv) > 2 else 10
n_chars = min(int(sys.argv[3]), 1_000_000) if len(sys.argv) > 3 else 3000
assert url.hostname in ("127.0.0.1", "localhost", "::1"), "only loopback"
TEXT = "/v1/completions"


def ask(method, path, body=None):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
    connection.request(method, path, body)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    assert reply.status == 200, (path, reply.status, data[:500])
    return json.loads(data) if data[:1] in b"{[" else data


def main():
    until = time.monotonic() + seconds
    n_tokens, lock, faults = [0], threading.Lock(), []

    def load(client):
        at = 0
        while time.monotonic() < until:
            at += 1
            # No two share a beginning, so that nothing is held of any.
            prompt = f"{client} {at} " + "the quick brown fox jumps over it. " * (n_chars // 35)
            try:
                usage = ask("POST", TEXT, json.dumps({"prompt": prompt, "max_tokens": 1}))["usage"]
            except (AssertionError, OSError) as fault:
                faults.append(fault)
                return
            with lock:
                n_tokens[0] += usage["prompt_tokens"]

    answer = ask("POST", TEXT, json.dumps({"prompt": "x", "max_tokens": 2}))["id"]
    paths = ["/health", "/ready", "/metrics", f"/v1/eldr/explain?id={answer}", "/v1/eldr/workers", "/slots"]
    times = {path: [] for path in paths}
    threads = [threading.Thread(target=load, args=(client,)) for client in range(8)]
    began = time.monotonic()
    [thread.start() for thread in threads]
    while time.monotonic() < until:
        for path in paths:
            asked = time.perf_counter()
            ask("GET", path)
            times[path].append(time.perf_counter() - asked)
        time.sleep(0.01)
    [thread.join() for thread in threads]
    assert not faults, faults[0]
    print(f"{n_tokens[0] / (time.monotonic() - began):.0f} prompt tokens a second meanwhile")
    for path, took in times.items():
        took.sort()
        p50, p99, most = took[len(took) // 2], took[int(len(took) * 0.99)], took[-1]
        print(f"{path.split('?')[0]:<18} p50 {p50 * 1e3:6.2f} ms  p99 {p99 * 1e3:6.2f} ms  most {most * 1e3:6.2f} ms  of {len(took)}")


main()
