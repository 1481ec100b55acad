"""The same closed loops to several servers, in turns: side_by_side.py NAME=URL=PID[,PID..].. , the last of which is eldr.

For each of the WORKLOADS (mixed) and CLIENTS (1 8 16 32), so many streams at a time until a fixed list of requests has ended, ROUNDS (5)
times, the sides in turn; SCALE (1) is the list's length. Prints, of each peer, the middle ratio of eldr to it and the ratios' quarters:
output tokens a second, the time to the first token, the time a token after it, and the time of the processes of PID a token, which
other programs on the machine disturb least. Workloads of examples/data/task.serve.jsonl: `mixed`, its four domains in turn; `one`, the
first domain alone, in which a router finds nothing to tell apart. Only loopback.
"""

import asyncio
import json
import os
import pathlib
import random
import sys
import time
import urllib.parse

NAMES, URLS, PIDS = zip(*(side.split("=") for side in sys.argv[1:]))
URLS, PIDS = [urllib.parse.urlparse(url) for url in URLS], [pids.split(",") for pids in PIDS]
assert len(URLS) > 1 and all(url.hostname == "127.0.0.1" for url in URLS), "two sides, and only loopback"
CLIENTS = [int(n) for n in os.environ.get("CLIENTS", "1 8 16 32").split()]
ROUNDS, SCALE = int(os.environ.get("ROUNDS", "5")), float(os.environ.get("SCALE", "1"))
LINES = (pathlib.Path(__file__).parents[2] / "examples/data/task.serve.jsonl").read_text(encoding="utf-8").splitlines()
ENTRIES = [json.loads(line) for line in LINES]
PROMPTS = {
    "mixed": [entry["prompt"][:800] for entry in ENTRIES],
    "one": [entry["prompt"][:800] for entry in ENTRIES if entry["domain"] == ENTRIES[0]["domain"]],
}
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "ignore_eos": True, "stream": True, "cache_prompt": False,
            "stream_options": {"include_usage": True}}
MEASURES = [("throughput", "tokens/s"), ("TTFT p50", "ms"), ("TTFT p99", "ms"), ("TPOT p50", "ms"), ("TPOT p99", "ms"), ("CPU a token", "ms")]


def cpu_seconds(pids):
    fields = (pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")


def peak_mib(pids):
    lines = (line for pid in pids for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


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
    """One side's MEASURES."""
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


def quarter(values, share):
    return sorted(values)[round((len(values) - 1) * share)]


async def compare(workload, n_clients):
    draw = random.Random(1)
    n = max(4, round(SCALE * (8 if n_clients == 1 else 4 * n_clients)))
    rounds, sides = [], list(range(len(URLS)))
    for _ in range(ROUNDS):
        requests = [(draw.choice(PROMPTS[workload]), draw.randint(32, 96), seed) for seed in range(n)]
        rounds.append({which: await side(which, n_clients, requests) for which in sides})
        sides = sides[1:] + sides[:1]
    eldr = len(URLS) - 1
    for peer in range(eldr):
        print(f"{workload}, {n_clients} clients, eldr / {NAMES[peer]}:")
        for i, (name, unit) in enumerate(MEASURES):
            ours, theirs = (quarter([got[which][i] for got in rounds], 0.5) for which in (eldr, peer))
            ratios = [got[eldr][i] / got[peer][i] for got in rounds]
            print(f"  {name:<11} {quarter(ratios, 0.5):.3f} ({quarter(ratios, 0.25):.3f} to {quarter(ratios, 0.75):.3f}), "
                  f"{ours:.2f} and {theirs:.2f} {unit}", flush=True)


async def main():
    for url in URLS:
        for seed in range(8):  # every server behind a balancer
            await stream(url, PROMPTS["mixed"][0], 8, seed)
    for workload in os.environ.get("WORKLOADS", "mixed").split():
        for n_clients in CLIENTS:
            await compare(workload, n_clients)
    peaks = [f"{name} {peak_mib(pids):.0f} MiB" for name, pids in zip(NAMES, PIDS)]
    print(f"peak memory, pages of the mapped model included in each process: {', '.join(peaks)}")


asyncio.run(main())
