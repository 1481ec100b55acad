"""The same streams to two servers, in turns: nginx.py THEIR_URL OUR_URL [CLIENTS [SECONDS [ROUNDS]]].

Each side gets CLIENTS (16) streams at a time for SECONDS (15), and so does the other, ROUNDS (7) times, the first of a round in
turn. What ends within the time counts. Prints each round's and the middle ratio of output tokens a second and of the time an
output token takes. Only loopback.
"""

import http.client
import json
import pathlib
import sys
import threading
import time
import urllib.parse

N_TOKENS = 96
URLS = [urllib.parse.urlparse(url) for url in sys.argv[1:3]]
N_CLIENTS, SECONDS, ROUNDS = (int(given) for given in (sys.argv[3:] + ["16", "15", "7"][len(sys.argv) - 3:]))
assert all(url.hostname == "127.0.0.1" for url in URLS), "only loopback"
LINES = (pathlib.Path(__file__).parents[2] / "examples/data/task.serve.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [json.loads(line)["prompt"][:600] for line in LINES]


def stream(url, prompt, until):
    """The moments of a stream's tokens; none where it did not end in time."""
    body = {"prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0.8, "seed": 1, "ignore_eos": True, "stream": True,
            "cache_prompt": False}
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body))
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    moments = []
    for line in reply:
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"]
            if choice and not choice[0].get("finish_reason"):
                moments.append(time.perf_counter())
        if time.perf_counter() > until:
            connection.sock and connection.sock.close()
            break
    connection.close()
    return moments


def side(url, first):
    """Output tokens a second, the middle and the 99th of the times an output token took, and how many streams ended."""
    began = time.perf_counter()
    until, lock, at, streams = began + SECONDS, threading.Lock(), [first], []

    def client():
        while time.perf_counter() < until:
            with lock:
                prompt, at[0] = PROMPTS[at[0] % len(PROMPTS)], at[0] + 1
            moments = stream(url, prompt, until)
            with lock:
                streams.append(moments)

    threads = [threading.Thread(target=client) for _ in range(N_CLIENTS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    n_tokens = sum(sum(moment <= until for moment in moments) for moments in streams)
    # The first seconds fill the batches, the last ones empty nobody's.
    tpot = sorted((moments[-1] - moments[0]) / (len(moments) - 1) for moments in streams if len(moments) > N_TOKENS // 2)
    assert tpot, "no stream got far enough: give more seconds"
    time.sleep(0.5)
    return n_tokens / SECONDS, tpot[len(tpot) // 2], tpot[int(len(tpot) * 0.99)], len(tpot)


def middle(values):
    return sorted(values)[len(values) // 2]


def main():
    for url in URLS:
        stream(url, PROMPTS[0], time.perf_counter() + 60)
    rounds = []
    for at in range(ROUNDS):
        order = [0, 1] if at % 2 == 0 else [1, 0]
        got = {which: side(URLS[which], at * 1000) for which in order}
        (rate, p50, p99, n), (our_rate, our_p50, our_p99, our_n) = got[0], got[1]
        rounds.append((our_rate / rate, our_p50 / p50, our_p99 / p99))
        print(f"round {at + 1}: llama-server behind nginx {rate:.0f} tokens/s, TPOT p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms of {n}; "
              f"eldr {our_rate:.0f} tokens/s, {our_p50 * 1e3:.2f} ms, {our_p99 * 1e3:.2f} ms of {our_n}", flush=True)
    for name, ratios in zip(("throughput", "TPOT p50", "TPOT p99"), zip(*rounds)):
        ratios = sorted(ratios)
        print(f"{name}: eldr / llama-server {middle(ratios):.3f} (least {ratios[0]:.3f}, most {ratios[-1]:.3f})")


main()
