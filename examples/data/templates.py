"""Turns a phrase table into pages of text.

It never chooses how long a page is and never draws from anything but the given random generator.

A table is a list of rules, each a name, flags, and the items that may stand for it:

    %% a comment
    :: say split
    To $do, press $(Enter|Return).
    == printers
    :: do
    cancel a job | cancelling a job

Rules below `== topic` belong to that topic and hide the general ones of the same name; topics go to the two sets in turn.

    $do $do.1 $^do      an item of rule `do`, its second field, the same with a capital; kept within one sentence
    $do2 ${do}s         another item of the rule; the same item with a letter behind it
    $say*2-4 $step*2-4/ two to four items after one another, or each on a line
    $(on|off) $3-9 \\n   one of these words, a number, a new line

    once                one item for the whole prompt
    split               every set has its own half of the items
    ordered             repeated items stay in the order of the table
    blocks              items are separated by blank lines; one goes on behind a blank line if that is indented, and the
                        members of a class, `impl` or `mod` come in any order
"""

import re

MEMBERS = re.compile(r"^(class|impl|mod)\b", re.MULTILINE)

SLOT = re.compile(
    r"\$(?:\((?P<either>[^()]*)\)"
    r"|(?P<low>\d+)-(?P<high>\d+)"
    r"|(?P<brace>\{)?(?P<upper>\^?)(?P<rule>[a-z]+)(?P<other>\d?)(?(brace)\})"
    r"(?:\.(?P<field>\d))?(?:\*(?P<least>\d+)-(?P<most>\d+)(?P<lines>/?))?)"
)


class Rule:
    """The items of one name and its flags."""

    def __init__(self, flags):
        self.items = []
        self.once, self.split, self.ordered, self.blocks = (
            name in flags for name in ("once", "split", "ordered", "blocks")
        )


class Grammar:
    """The rules of one table that belong to one set of prompts."""

    def __init__(self, rules, topics, joiner):
        self.rules, self.by_topic, self.joiner = rules, topics, joiner
        self.topics = list(topics)

    @classmethod
    def load(cls, path, half):
        """Reads `path`; `half` is 0 or 1, the set of prompts."""
        general, topics = {}, {}
        scope, rule = general, None
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.startswith("%%"):
                continue
            if line.startswith("== "):
                scope, rule = topics.setdefault(line[3:], {}), None
            elif line.startswith(":: "):
                name, *flags = line[3:].split()
                rule = scope[name] = Rule(flags)
                fresh = True
            elif rule is None:
                if line:
                    raise ValueError(f"{path.name}:{number}: text before the first rule; begin it with ':: name'")
            elif not line:
                fresh = True
            elif rule.blocks and rule.items and (not fresh or line.startswith(" ")):
                rule.items[-1] += ("\n\n" if fresh else "\n") + line
                fresh = False
            else:
                rule.items.append(line)
                fresh = False
        chosen = dict(list(topics.items())[half::2])
        for rules in [general, *chosen.values()]:
            for rule in rules.values():
                if rule.split:
                    rule.items = rule.items[half::2]
        return cls(general, chosen, "" if path.stem == "zh" else " ")

    def start(self, topic, rng):
        """A prompt about `topic`."""
        return Page(self, {**self.rules, **self.by_topic[topic]}, rng)


class Page:
    """One prompt: remembers what it has used, so that items come back only when a rule has no others."""

    def __init__(self, grammar, rules, rng):
        self.joiner, self.rules, self.rng = grammar.joiner, rules, rng
        self.bags, self.kept = {}, {}

    def expand(self, text, scope=None):
        """`text` with every slot filled; without a scope each slot is a sentence of its own."""
        return SLOT.sub(lambda slot: self.fill(slot, scope), text)

    def fill(self, slot, scope):
        if slot["either"] is not None:
            return self.expand(self.rng.choice(slot["either"].split("|")), scope)
        if slot["low"]:
            return str(self.rng.randint(int(slot["low"]), int(slot["high"])))
        if slot["most"]:
            count = self.rng.randint(int(slot["least"]), int(slot["most"]))
            rule, key = self.rule(slot["rule"]), slot["rule"] + slot["other"]
            items = [self.draw(key, rule, ()) for _ in range(count)]
            if rule.ordered:
                items.sort(key=rule.items.index)
            parts = [self.take(slot, {key: item}) for item in items]
            return ("\n" if slot["lines"] else self.joiner).join(parts)
        return self.take(slot, {} if scope is None else scope)

    def take(self, slot, scope):
        name = slot["rule"]
        rule = self.rule(name)
        memory, key = (self.kept if rule.once else scope), name + slot["other"]
        if key not in memory:
            memory[key] = self.draw(key, rule, memory.values())
        item = memory[key]
        if rule.blocks:
            item = self.reorder(item)
        elif name != "page" and name != "more":
            fields = item.split(" | ")
            index = int(slot["field"] or 0)
            if index >= len(fields):
                raise ValueError(f"'${name}.{index}': the item '{item}' has only {len(fields)} fields")
            item = fields[index]
        if not rule.blocks:
            item = item.replace("\\n", "\n")
        text = self.expand(item, None if name in ("page", "more") else scope)
        return text[:1].upper() + text[1:] if slot["upper"] else text

    def reorder(self, block):
        """The block with the parts behind its first blank line shuffled, if they are members of a type."""
        head, *members = block.split("\n\n")
        if not members or not MEMBERS.search(head):
            return block
        end = "\n}" if block.endswith("\n}") else ""
        members[-1] = members[-1][: len(members[-1]) - len(end)]
        self.rng.shuffle(members)
        return "\n\n".join([head, *members]) + end

    def rule(self, name):
        if name not in self.rules:
            raise ValueError(f"'${name}' has no rule; known are {', '.join(sorted(self.rules))}")
        return self.rules[name]

    def draw(self, key, rule, used):
        """The next item of a shuffled bag, if possible one that the sentence does not hold yet."""
        if not self.bags.get(key):
            self.bags[key] = list(rule.items)
            self.rng.shuffle(self.bags[key])
        bag = self.bags[key]
        fresh = [place for place, item in enumerate(bag) if item not in used]
        return bag.pop(fresh[-1] if fresh else -1)
