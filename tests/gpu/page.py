"""One JSON document and one Markdown page of what tests/gpu/run.sh found; ends with 1 and a sentence if a check failed.

Never measures anything itself: OUT holds the files of the program and of the bench.
"""

import json
import pathlib
import sys

out, device, size = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
KINDS = {"Cpu": "the host's processors", "Gpu": "a GPU", "IntegratedGpu": "an integrated GPU", "Rpc": "a device behind RPC"}
BALANCERS = ["round_robin", "least_loaded", "power_of_two", "random"]


def read(name):
    return json.loads((out / name).read_text())


def pools():
    named = sorted(out.glob("policies.*.json"), key=lambda path: int(path.suffixes[0][1:]))
    return {int(path.suffixes[0][1:]): json.loads(path.read_text()) for path in named}


def check(name, ok, found):
    return {"check": name, "ok": bool(ok), "found": found}


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def percent(share):
    return f"{share * 100:+.1f} %"


doctor, checked, costs, runs = read("doctor.json"), read("device.json"), read("cost.json"), pools()
parts = {part["check"]: part for part in checked["parts"]}
speeds = {int(path.suffixes[0][1:]): json.loads(path.read_text()) for path in out.glob("speed.*.json")}
peers = {int(path.suffixes[0][1:]): json.loads(path.read_text()) for path in out.glob("peer.*.json")}


def measured(start):
    """What the part whose name starts so measured; none if it failed."""
    return next(part["measured"] for name, part in parts.items() if name.startswith(start))


def policy_checks():
    for pool, report in runs.items():
        failed = [run["policy"] for run in report["runs"] if run["failed"] or not run["requests"]]
        wanted = {"locality_band", "marginal_cost", *BALANCERS}
        missing = wanted - {run["policy"] for run in report["runs"]}
        words = "every request of every policy was served" if not failed else "requests failed under " + ", ".join(failed)
        if missing:
            words = "no run of " + ", ".join(sorted(missing))
        yield check(f"{pool} workers serve the workload under {len(wanted)} policies", not failed and not missing, words)
        idle = [run["policy"] for run in report["runs"] if run["policy"] == "round_robin" and 0 in run["steps"]]
        yield check(f"round robin uses all {pool} workers", not idle, f"{'not ' if idle else ''}every worker ran steps")


checks = [{key: part[key] for key in ("check", "ok", "found")} for part in checked["parts"]]
checks += policy_checks()
batches = {row["setting"]["batch"]: row["measured"] for row in costs["rows"]}
checks.append(check("step times of several batch sizes", len(batches) > 1, f"{len(batches)} batch sizes were timed"))

decode = {row["batch"]: row for row in measured("decode steps") or []}
compared = []  # A sequence's median gap, while the batch is full nearly all the time.
for batch, report in sorted(speeds.items()):
    run = report["runs"][0]
    gap = run["itl_ms"]["p50"]
    # The report's own batch is of the steps until the last request is admitted, which here may be none.
    at_once = run["output_tokens_per_s"] * run["itl_ms"]["mean"] / 1e3
    row = {"batch": batch, "engine_ms": gap, "engine_batch": at_once, "bare_ms": decode.get(batch, {}).get("plain_ms")}
    if batch in peers:
        row["peer_ms"] = batch * 1e3 / peers[batch]["speed_tg"]
    compared.append(row)
unfinished = [batch for batch, report in speeds.items() if report["runs"][0]["requests"] != batch]
words = f"batches {', '.join(map(str, sorted(speeds)))} ran to their end" if not unfinished else f"requests failed in batches of {unfinished}"
checks.append(check("the engine decodes while its speed is measured", compared and not unfinished, words))

document = {
    "asked": device,
    "size": size,
    "device": checked["device"],
    "machine": doctor["machine"],
    "versions": doctor["versions"],
    "checks": checks,
    "parts": checked["parts"],
    "policies": runs,
    "step_costs": costs,
    "decode_speed": compared,
    "plan": doctor["plan"],
}
for report in runs.values():
    report["machine"].pop("host", None)
(out / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")

who, machine = checked["device"], doctor["machine"]
page = [
    f"# {who['name']}: {who['description']}",
    "",
    f"Device {who['name']}, {KINDS.get(who['kind'], who['kind'])}: {who['description']}, {who['total_bytes'] / 2**30:.1f} GiB. Host: {machine['cpu']}, "
    f"{machine['cores']} cores. {doctor['versions']['llama_cpp']}. Written by `DEVICE={device} SIZE={size} bash tests/gpu/run.sh`; "
    f"times are of {who['timed_model']}.",
    "",
]
if who["kind"] not in ("Gpu", "IntegratedGpu"):
    page += [f"**No GPU ran this: {who['name']} is {KINDS.get(who['kind'], who['kind'])}.**", ""]
elif "llvmpipe" in who["description"].lower() or "lavapipe" in who["description"].lower():
    page += ["**No GPU ran this: the device is Mesa's Vulkan driver on the CPU.**", ""]
if size == "small":
    page += ["The small setting shows that every part runs; its times mean nothing.", ""]
page += ["## Checks", ""] + table(["check", "", "found"], [(c["check"], "ok" if c["ok"] else "**failed**", c["found"]) for c in checks]) + [""]

prefill = measured("the tap in prefill")
if prefill:
    page += [
        "## The tap",
        "",
        f"A prefill of {prefill['n_tokens']} tokens takes {prefill['plain_ms']:.2f} ms without a tap; {percent(prefill['masked'])} with it on "
        f"{prefill['n_masked']} layers, {percent(prefill['all'])} on all. Decode contexts of eldr carry none:",
        "",
    ]
    page += table(
        ["batch", "step without a tap, ms", "tokens/s", "with a tap that is not asked", "with one on every layer"],
        [(b, f"{r['plain_ms']:.3f}", f"{r['tokens_per_s']:.0f}", percent(r["idle_tap"]), percent(r["tap"])) for b, r in decode.items()],
    )
    page += ["", "Decode speed, ms between a sequence's tokens: the engine at work, bare steps, and llama-batched-bench.", ""]
    times = lambda row: (f"{row[k]:.3f}" if row.get(k) else "not run" for k in ("engine_ms", "bare_ms", "peer_ms"))
    shown = [(r["batch"], f"{r['engine_batch']:.1f}", *times(r)) for r in compared]
    page += table(["batch", "of them at once in the engine", "engine", "bare", "llama-batched-bench"], shown) + [""]

wide = measured("batches of known picks")
if wide:
    page += [
        "## Step time against distinct experts",
        "",
        f"{wide['batch']} sequences, {wide['n_layer']} layers of {wide['n_expert']} experts of {wide['expert_bytes'] / 1024:.0f} KiB, 8 a token; "
        "only the picks differ.",
        "",
    ]
    page += table(["distinct experts a layer", "ms a step"], [(row["experts"], f"{row['ms']:.3f}") for row in wide["steps"]]) + [""]

page += ["Of the timed model, by batch size:", ""]
page += table(
    ["batch", "ms a step", "distinct experts a layer", "tokens/s"],
    [(b, f"{m['step_ms']:.3f}", f"{m['experts_per_step']:.1f}", f"{m['tokens_per_s']:.0f}") for b, m in sorted(batches.items())],
) + [""]

page += ["## Policies", "", "Virtual clock: one step at a time on the device, as if each worker had it alone.", ""]
for pool, report in runs.items():
    base = min(run["tpot_ms"]["p50"] for run in report["runs"] if run["policy"] in BALANCERS)
    rows = [
        (
            run["policy"],
            f"{run['experts_distinct']['mean']:.1f}",
            f"{run['batch']['mean']:.1f}",
            f"{run['experts_per_token']:.2f}",
            f"{run['tpot_ms']['p50']:.2f} / {run['tpot_ms']['p99']:.2f}",
            percent(run["tpot_ms"]["p50"] / base - 1),
        )
        for run in report["runs"]
    ]
    page += [f"{pool} decode workers:", ""]
    page += table(["policy", "distinct experts", "batch", "experts a token", "TPOT p50 / p99, ms", "p50 against the best balancer"], rows) + [""]

greedy = measured("greedy outputs")
if greedy:
    page += ["Greedy outputs against round robin's:", ""]
    rows = [(r["setting"], r["policy"], f"{r['n_equal']} of {r['n_requests']}", f"{r['tokens_until_they_part'] * 100:.1f} %") for r in greedy]
    page += table(["setting", "policy", "equal", "tokens until they part"], rows) + [""]

memory = measured("workers take the memory")
if memory:
    page += ["## Memory", ""]
    mib = lambda n: f"{n / 2**20:.1f}"
    rows = [(i + 1, *(mib(r[k]) for k in ("weights", "kv", "compute", "less_free"))) for i, r in enumerate(memory["workers"])]
    page += table(["worker", "weights (shared), MiB", "keys and values", "buffers", "less free on the device"], rows) + [""]

(out / "gpu.md").write_text("\n".join(page).rstrip() + "\n")
print(f"wrote {out / 'gpu.md'} and {out / 'gpu.json'}")
failed = [c for c in checks if not c["ok"]]
if failed:
    sys.exit(f"{len(failed)} of {len(checks)} checks failed on {who['name']}; the first: {failed[0]['check']}: {failed[0]['found']}")
print(f"all {len(checks)} checks passed on {who['name']}, {who['description']}")
