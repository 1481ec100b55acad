#!/usr/bin/env python3
"""Makes a workload of conversations from a file of prompts, always the same bytes: every request repeats a system prompt
that others share and all that was said before.

It never asks a model: the answers said before are texts of the same domain.

    python3 make_chats.py task.serve.jsonl > chats.jsonl
"""

import json
import sys

TURNS = 4
CHATS_PER_DOMAIN = 6
QUESTION = 260  # characters of what a user says
ANSWER = 200  # characters of what was answered
MAX_TOKENS = 24

SYSTEM = (
    "You help the people who work at a small workshop with everything they write, read and count. Answer in the language "
    "of the question, in as few sentences as will do, and say so when you do not know. Never invent a number, a name or a "
    "rule. Where a step can be checked, show how. Today you help with questions about {}. The workshop keeps its own list "
    "of words; use them as they are, and ask once if one of them is missing.\n"
)


def main():
    with open(sys.argv[1], encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    domains = {}
    for item in items:
        domains.setdefault(item["domain"], []).append(item["prompt"])
    requests = []
    for domain, texts in domains.items():
        for chat in range(CHATS_PER_DOMAIN):
            said = SYSTEM.format(domain)
            for turn in range(TURNS):
                at = 2 * (chat * TURNS + turn)
                said += f"\nUser: {texts[at % len(texts)][:QUESTION]}\nAnswer:"
                requests.append((turn, chat, domain, said))
                said += " " + texts[(at + 1) % len(texts)][:ANSWER]
    # A turn comes after the turn before of every conversation, so that the answer to that one is there.
    for turn, chat, domain, said in sorted(requests, key=lambda request: request[:2]):
        name = f"{domain}-{chat}-{turn}"
        print(json.dumps({"id": name, "domain": domain, "prompt": said, "max_tokens": MAX_TOKENS}, ensure_ascii=False))


main()
