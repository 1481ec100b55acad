"""Requests over a cable that is cut in the middle of hand-offs: netns_load.py [options] WIRE_PID WIRE_LOG SERVER_LOG -- SERVE..

SERVE.. is a command line of `eldr serve` with one decode worker here and one behind the cable; a first server with both
here says what the texts are. Exits with one sentence if a text differs, a request fails or takes longer than the bound,
or the worker behind the cable is not lost with its cable and back with it. Prints one line of JSON otherwise.
"""

import argparse
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

PROMPTS = [
    "def area(width, height):\n    return",
    "Solve the equation: 3x + 5 = 20.",
    "The patient reports chest pain since",
    "This agreement is governed by the laws of",
    "Pour installer le paquet, ouvrez un terminal et",
    "Compute 17 * 23.",
]
REMOTE = 1


class Wrong(Exception):
    """One sentence."""


class Server:
    def __init__(self, line, log):
        self.log = open(log, "w", encoding="utf-8")
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=self.log, text=True)
        first = self.process.stdout.readline()
        if not first:
            raise Wrong(f"the server did not start: {pathlib.Path(log).read_text(encoding='utf-8').strip()}")
        self.port = int(json.loads(first)["url"].rsplit(":", 1)[1])

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request(method, path, json.dumps(body) if body else None)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        if reply.status != 200:
            raise Wrong(f"{path} was answered with {reply.status}: {text}")
        return json.loads(text)

    def workers(self):
        return self.ask("GET", "/v1/eldr/workers")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


class Load:
    """Requests side by side, all the time, the same few again and again."""

    def __init__(self, server, options, want):
        self.server, self.options, self.want = server, options, want
        self.seconds, self.problem, self.over = [], None, threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(at,)) for at in range(options.concurrency)]
        for thread in self.threads:
            thread.start()

    def run(self, at):
        try:
            while not self.over.is_set():
                index = at % len(PROMPTS)
                began = time.monotonic()
                text = complete(self.server, self.options, index)
                self.seconds.append(time.monotonic() - began)
                if text != self.want[index]:
                    raise Wrong(f"prompt {index} was answered with {text!r}, undisturbed with {self.want[index]!r}")
                at += self.options.concurrency + 1
        except (Wrong, OSError, http.client.HTTPException) as error:
            self.problem = self.problem or f"a request failed: {error}"
            self.over.set()

    def wait(self, what, seconds, done):
        """Until something is so; how long it took."""
        began = time.monotonic()
        while not done():
            if self.problem:
                raise Wrong(self.problem)
            if time.monotonic() - began > seconds:
                raise Wrong(f"{what} did not happen within {seconds:.0f} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        if self.problem:
            raise Wrong(self.problem)


def complete(server, options, index):
    body = {"prompt": PROMPTS[index] * 6, "max_tokens": options.tokens, "temperature": 0.7, "seed": index, "ignore_eos": True}
    return server.ask("POST", "/v1/completions", body)["choices"][0]["text"]


def events(log):
    """What the wire said so far."""
    return [json.loads(line) for line in pathlib.Path(log).read_text(encoding="utf-8").splitlines()]


def count(log, event):
    return sum(row["event"] == event for row in events(log))


def is_lost(server):
    return server.workers()["workers"][REMOTE]["lost"]


def is_used(server):
    return server.workers()["workers"][REMOTE]["n_inflight"] > 0


def undisturbed(options, line):
    here = line[: line.index("--decode") + 1] + ["2@cpu"] + line[line.index("--decode") + 2 :]
    server = Server(here, options.server_log + ".here")
    try:
        return [complete(server, options, index) for index in range(len(PROMPTS))]
    finally:
        server.end()


def resent():
    """TCP segments this network namespace has sent again."""
    names, values = (line.split() for line in open("/proc/net/snmp", encoding="utf-8") if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def cut(server, load, options):
    """One cut: how long until the worker was lost, and back after the cable was."""
    before, mended = count(options.wire_log, "cut"), count(options.wire_log, "mended")
    os.kill(options.wire_pid, signal.SIGUSR1)
    load.wait("a hand-off over the cable", 60, lambda: count(options.wire_log, "cut") > before)
    lost = load.wait("the loss of the worker", options.bound, lambda: is_lost(server))
    load.wait("the mending of the cable", 600, lambda: count(options.wire_log, "mended") > mended)
    back = load.wait("the return of the worker", options.patience, lambda: not is_lost(server))
    load.wait("a request for the worker that is back", 60, lambda: is_used(server))
    return {"lost_after_s": round(lost, 1), "back_after_s": round(back, 1)}


def disturbed(options, line, want):
    server = Server(line, options.server_log)
    try:
        load = Load(server, options, want)
        try:
            load.wait("a request for the worker behind the cable", 60, lambda: is_used(server))
            load.wait("a while with the cable whole", 600, lambda: len(load.seconds) >= 2 * len(PROMPTS))
            if is_lost(server):
                raise Wrong("the worker behind the cable was lost before the cable was cut")
            whole = max(load.seconds)
            cuts = [cut(server, load, options) for _ in range(options.cuts)]
            if count(options.wire_log, "cut") != options.cuts:
                raise Wrong("the cable was not cut as often as it was to be")
        finally:
            load.end()
        longest, n_lost = max(load.seconds), server.workers()["n_workers_lost"]
    finally:
        server.end()
    if n_lost != options.cuts:
        raise Wrong(f"the worker was lost {n_lost} times in {options.cuts} cuts")
    if longest > options.bound:
        raise Wrong(f"a request took {longest:.1f} s, {whole:.1f} s with the cable whole, and may take {options.bound:.0f} s")
    return {
        "requests": len(load.seconds),
        "same_texts": len(load.seconds),
        "cuts": cuts,
        "longest_request_s": {"cable whole": round(whole, 1), "in all": round(longest, 1), "bound": options.bound},
        "segments_resent": resent(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--bound", type=float, required=True, help="seconds the longest request may take")
    parser.add_argument("--patience", type=float, default=120, help="seconds until a worker must be back")
    parser.add_argument("wire_pid", type=int)
    parser.add_argument("wire_log")
    parser.add_argument("server_log")
    at = sys.argv.index("--")
    options, line = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    try:
        print(json.dumps(disturbed(options, line, undisturbed(options, line))))
    except Wrong as error:
        raise SystemExit(str(error)) from None


main()
