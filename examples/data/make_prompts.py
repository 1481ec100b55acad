#!/usr/bin/env python3
"""Writes the prompts of the example workloads, always the same bytes.

It never reads anything but the phrase tables beside it, and never the clock.

    python3 make_prompts.py            writes {task,language}.{calibration,serve}.jsonl
    python3 make_prompts.py --check    exits 1 if the files on disk are not what it would write
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # a check leaves nothing behind

from problems import worked_problems
from templates import Grammar

HERE = Path(__file__).resolve().parent
SEED = 20240
PER_DOMAIN = 100
WORKLOADS = {"task": ["code", "math", "medical", "legal"], "language": ["en", "zh", "ru", "fr"]}
SETS = ["calibration", "serve"]
TABLES = {"code": ["python", "rust"]}
MORE_PARTS = {"code": 6}  # before the next topic begins

# Characters one token of the shipped model's tokenizer covers in these prompts, times 100.
CHARS_PER_100_TOKENS = {
    "code": 262, "math": 241, "medical": 266, "legal": 329, "en": 300, "zh": 108, "ru": 204, "fr": 265,
}

# Quantiles at equal steps; a draw is interpolated between two neighbours, in whole numbers.
PROMPT_TOKENS = [30, 50, 70, 90, 112, 132, 154, 182, 220, 272, 336, 470]
OUTPUT_TOKENS = [8, 20, 28, 36, 44, 52, 60, 71, 86, 110, 150, 256]


def draw(rng, quantiles):
    """A whole number whose distribution has these quantiles."""
    step = rng.randrange(len(quantiles) - 1)
    low, high = quantiles[step], quantiles[step + 1]
    return low + rng.randrange(high - low + 1)


def cut(text, limit, spaced, rng):
    """At most `limit` characters of `text`: usually the last word is the limit, sometimes the last sentence."""
    if len(text) > limit:
        text = text[:limit]
        ends = [text.rfind(mark) + 1 for mark in ("\n", ". ", "; ", "\u3002")]
        if max(ends) * 10 > limit * 6 and rng.randrange(10) < 3:
            text = text[: max(ends)]
        elif spaced and " " in text.strip():
            text = text[: max(text.rfind(" "), text.rfind("\n"))]
    return text.strip()


def text_prompt(grammars, domain, turn, limit, rng):
    """Pages up to `limit` characters, about a third of them below a line that asks to go on; `turn` picks the topic."""
    grammar, turn = grammars[turn % len(grammars)], turn // len(grammars)
    ask, text = "", ""
    while len(text) < limit:
        page = grammar.start(grammar.topics[turn % len(grammar.topics)], rng)
        ask = ask or page.expand("$ask") + "\n"
        text += page.expand("$page") + "\n"
        for _ in range(MORE_PARTS.get(domain, 2)):
            text += page.expand("$more") + "\n"
        turn += 1
    text = cut(text, limit, domain != "zh", rng)
    return ask + text if rng.randrange(10) < 3 else text


def math_prompt(half, limit, rng):
    """One bare question, or worked problems of which the last has no solution yet."""
    problems = worked_problems(half, rng)
    question, solution = next(problems)
    if limit < 150:
        return question
    head, tail = rng.choice([("Problem: ", "Solution:"), ("Problem: ", "Solution:"), ("Exercise: ", "Solution:")])
    text = ""
    while True:
        text += head + question + "\n" + tail
        if len(text) + len(solution) // 2 > limit:
            return text
        text += "\n" + solution + "\n\n"
        question, solution = next(problems)


def domain_prompts(domain, half, seed):
    """`PER_DOMAIN` different prompts of one domain; half 0 and half 1 share no topic and no sentence."""
    rng = random.Random(seed)
    grammars = [Grammar.load(HERE / "phrases" / f"{name}.txt", half) for name in TABLES.get(domain, [domain])] \
        if domain != "math" else []
    seen, rows = set(), []
    while len(rows) < PER_DOMAIN:
        limit = draw(rng, PROMPT_TOKENS) * CHARS_PER_100_TOKENS[domain] // 100
        if domain == "math":
            prompt = math_prompt(half, limit, rng)
        else:
            prompt = text_prompt(grammars, domain, len(rows), limit, rng)
        if prompt not in seen:
            seen.add(prompt)
            rows.append({"domain": domain, "prompt": prompt, "max_tokens": draw(rng, OUTPUT_TOKENS)})
    return rows


def build():
    """File name to content of the four workloads."""
    files, seen = {}, {}
    for workload, domains in WORKLOADS.items():
        for half, name in enumerate(SETS):
            rows = [row for domain in domains for row in domain_prompts(domain, half, f"{SEED} {name} {domain}")]
            random.Random(f"{SEED} {name} {workload}").shuffle(rows)
            lines = []
            for number, row in enumerate(rows):
                row = {"id": f"{workload}-{name}-{number:04d}", **row}
                other = seen.setdefault(row["prompt"], row["id"])
                if other != row["id"]:
                    raise ValueError(f"{row['id']} repeats the prompt of {other}: give its topic more sentences")
                lines.append(json.dumps(row, ensure_ascii=False))
            files[f"{workload}.{name}.jsonl"] = "\n".join(lines) + "\n"
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the files on disk and write nothing")
    check = parser.parse_args().check
    stale = []
    for name, content in build().items():
        path, data = HERE / name, content.encode("utf-8")
        if not check:
            path.write_bytes(data)
        elif not path.exists() or path.read_bytes() != data:
            stale.append(name)
    if stale:
        sys.exit(f"{', '.join(stale)}: not what make_prompts.py writes; run it without --check and commit the result")


if __name__ == "__main__":
    main()
