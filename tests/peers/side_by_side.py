"""The same closed loops to two servers, in turns: side_by_side.py THEIR_URL THEIR_PID OUR_URL OUR_PID [CLIENTS.. [-- ROUNDS SCALE]].

For each number of CLIENTS (1 8 16 32): so many streams at a time until a fixed list of requests has ended, the first side of a round
in turn. Prints the middle ratio, eldr over the other, and its quarters: output tokens a second, the time to the first token, the
time a token after it, and the processor's time a token, which other programs on the machine disturb least. Only loopback.
"""

import asyncio
import json
import os
import pathlib
import random
import sys
import time
import urllib.parse

given = sys.argv[1:]
cut = given.index("--") if "--" in given else len(given)
given, more = given[:cut], given[cut + 1:]
URLS, PIDS = [urllib.parse.urlparse(url) for url in given[0:4:2]], [int(pid) for pid in given[1:4:2]]
CLIENTS = [int(n) for n in given[4:]] or [1, 8, 16, 32]
ROUNDS, SCALE = int(more[0]) if more else 5, float(more[1]) if len(more) > 1 else 1.0
assert all(url.hostname == "127.0.0.1" for url in URLS), "only loopback"
LINES = (pathlib.Path(__file__).parents[2] / "examples/data/task.serve.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [json.loads(line)["prompt"][:800] for line in LINES]
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "ignore_eos": True, "stream": True, "cache_prompt": False,
            "stream_options": {"include_usage": True}}


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid):
    line = next(line for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


async def stream(url, prompt, n_tokens, seed):
    """When it was asked, and the moments of its tokens."""
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 20)
    body = json.dumps({"prompt": prompt, "max_tokens": n_tokens, "seed": seed, **SAMPLING}).encode()
    began = time.perf_counter()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n" % len(body) + body)
    status = await reader.readline()
    assert b" 200 " in status, status + await reader.read()
    moments, n_drawn = [], 0
    while line := await reader.readline():
        # A token that holds a part of a letter has no chunk; the last chunks have a reason, then the usage, and no token.
        if line.startswith(b"data: {"):
            if b'"finish_reason":null' in line:
                moments.append(time.perf_counter())
            else:
                n_drawn = max(n_drawn, (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", 0))
    writer.close()
    assert moments and n_drawn == n_tokens, f"{n_drawn} of {n_tokens} tokens in {len(moments)} chunks"
    return began, moments


async def side(which, n_clients, requests):
    """Tokens a second, TTFT p50 and p99, TPOT p50 and p99, milliseconds of the processor a token."""
    left, done = list(reversed(requests)), []

    async def client():
        while left:
            request = left.pop()
            done.append((request[1], await stream(URLS[which], *request)))

    before, began = cpu_seconds(PIDS[which]), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(n_clients)))
    took, spent = time.perf_counter() - began, cpu_seconds(PIDS[which]) - before
    n_tokens = sum(n for n, _ in done)
    ttft = sorted(moments[0] - asked for _, (asked, moments) in done)
    tpot = sorted((moments[-1] - moments[0]) / (n - 1) for n, (_, moments) in done)
    at = lambda values, share: values[min(int(len(values) * share), len(values) - 1)] * 1e3
    return n_tokens / took, at(ttft, 0.5), at(ttft, 0.99), at(tpot, 0.5), at(tpot, 0.99), spent / n_tokens * 1e3


NAMES = ["throughput", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "CPU a token"]
UNITS = ["tokens/s", "ms", "ms", "ms", "ms", "ms"]


def quarter(values, share):
    return sorted(values)[round((len(values) - 1) * share)]


async def main():
    draw = random.Random(1)
    for url in URLS:
        await stream(url, PROMPTS[0], 8, 1)
    for n_clients in CLIENTS:
        n = max(4, round(SCALE * (8 if n_clients == 1 else 4 * n_clients)))
        rounds = []
        for at in range(ROUNDS):
            requests = [(draw.choice(PROMPTS), draw.randint(32, 96), seed) for seed in range(n)]
            got = {which: await side(which, n_clients, requests) for which in ([0, 1] if at % 2 == 0 else [1, 0])}
            rounds.append((got[0], got[1]))
        for i, name in enumerate(NAMES):
            theirs, ours = (quarter([pair[which][i] for pair in rounds], 0.5) for which in (0, 1))
            ratios = [pair[1][i] / pair[0][i] for pair in rounds]
            print(f"{n_clients:>2} clients, {name:<11} eldr {ours:8.2f}, llama-server {theirs:8.2f} {UNITS[i]:<8}  ratio "
                  f"{quarter(ratios, 0.5):.3f} (quarters {quarter(ratios, 0.25):.3f} to {quarter(ratios, 0.75):.3f})", flush=True)
    theirs, ours = map(peak_mib, PIDS)
    print(f"peak memory: eldr {ours:.0f} MiB, llama-server {theirs:.0f} MiB, ratio {ours / theirs:.3f}")


asyncio.run(main())
