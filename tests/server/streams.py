"""Many streams at once against a running `eldr serve --exact`: streams.py URL [STREAMS [TOKENS [PID]]].

Each must be whole and say what the same request says alone, twice. The memory of process PID must be the same after the second
time. Prints what /health took meanwhile. Only loopback.
"""

import http.client
import json
import multiprocessing
import sys
import threading
import time
import urllib.parse

url = urllib.parse.urlparse(sys.argv[1])
n_streams = min(int(sys.argv[2]), 1024) if len(sys.argv) > 2 else 256
n_tokens = min(int(sys.argv[3]), 256) if len(sys.argv) > 3 else 24
pid = int(sys.argv[4]) if len(sys.argv) > 4 else 0
assert url.hostname in ("127.0.0.1", "localhost", "::1"), "only loopback"
TOPICS = ["def parse_", "The court held that item ", "The patient took dose ", "Let x be "]


def body(i, stream):
    return json.dumps({"prompt": f"{TOPICS[i % 4]}{i}", "max_tokens": n_tokens, "temperature": 0, "stream": stream})


def connect():
    return http.client.HTTPConnection(url.hostname, url.port, timeout=600)


def alone(i):
    connection = connect()
    connection.request("POST", "/v1/completions", body(i, False))
    return json.load(connection.getresponse())["choices"][0]["text"]


def streamed(i):
    connection = connect()
    connection.request("POST", "/v1/completions", body(i, True))
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    text = ""
    for line in reply:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            text += json.loads(line[6:])["choices"][0]["text"]
    assert line.strip() == b"" and reply.isclosed(), "a stream that does not end"
    return text


def rss():
    if not pid:
        return 0
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def watch(over, health):
    """Asks /health until `over`; then tells how long each answer took, or what was wrong."""
    times = []
    try:
        while not over.is_set():
            started = time.perf_counter()
            connection = connect()
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200, "/health did not answer well"
            times.append(time.perf_counter() - started)
            time.sleep(0.02)
        health.put(times)
    except (AssertionError, OSError, http.client.HTTPException) as fault:
        health.put(f"{type(fault).__name__}: {fault}")


def at_once(want):
    """All streams at the same time; how many were wrong."""
    got, over, health = [None] * n_streams, multiprocessing.Event(), multiprocessing.Queue()

    def one(i):
        got[i] = streamed(i)

    # A process of its own, so that it waits for the server alone, not for this one's threads.
    watcher = multiprocessing.Process(target=watch, args=(over, health))
    threads = [threading.Thread(target=one, args=(i,)) for i in range(n_streams)]
    started = time.perf_counter()
    watcher.start()
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    took = time.perf_counter() - started
    over.set()
    health = health.get()
    watcher.join()
    assert isinstance(health, list) and health, f"/health: {health}"
    wrong = sum(a != b for a, b in zip(want, got))
    health.sort()
    print(f"{n_streams} streams of {n_tokens} tokens in {took:.1f} s: {n_streams - wrong} equal to the same request alone; "
          f"/health p50 {health[len(health) // 2] * 1e3:.1f} ms, p99 {health[int(len(health) * .99)] * 1e3:.1f} ms of {len(health)}")
    return wrong


def main():
    want = [alone(i) for i in range(n_streams)]
    wrong = at_once(want)
    warm = rss()
    wrong += at_once(want)
    grown = rss() - warm
    print(f"resident memory: {warm:.1f} MiB after the first time, {grown:+.1f} MiB after the second")
    assert grown < 32, "memory grows"
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
