"""Turns a valid file into a bad one, from a seed: values, structure, text and bytes."""

import json
from random import Random
from typing import Any

WHOLE = (0, -1, 1, 2, 255, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**50, 10**120)
REAL = (0.0, 0.5, -2.5, 1e-320, 1e308, 1e300, float("inf"), float("nan"))
TEXTS = (
    *("", "\n", "a\0b", "\x1b[2J", "\u202eevil", "[bold]x", "\ud800", "caf\udce9", "é雪", "x" * 3000, "9" * 400),
    *("../../etc/passwd", "/dev/zero", "~", "base", "..", "a/b", "1e999", "1/0", "(a+)+$", "[", "{}"),
    *("matched", "tunable_magmax", "magmax", "tsv", "ties", "F32", "F8_E4M3"),
)


def values(random: Random) -> Any:
    """Returns some value, of any kind."""
    kind = random.randrange(8)
    if kind == 0:
        return random.choice((None, True, False))
    if kind in (1, 2):
        return random.choice(WHOLE)
    if kind == 3:
        return random.choice(REAL)
    if kind in (4, 5):
        return random.choice(TEXTS)
    if kind == 6:
        return [values(random) for _ in range(random.randrange(4))]
    nested: Any = random.choice(WHOLE[:4])
    for _ in range(random.choice((1, 2, 3, 90, 150))):
        nested = [nested] if random.random() < 0.5 else {random.choice(TEXTS[11:16]): nested}
    return nested


def change(content: Any, random: Random) -> Any:
    """Changes one thing inside a value: replaced, removed, added, renamed, doubled or moved; returns the value."""
    places: list[tuple[Any, Any]] = []
    stack = [content]
    while stack:
        node = stack.pop()
        keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            places.append((node, key))
            stack.append(node[key])
    if not places or random.random() < 0.03:
        return values(random)
    node, key = random.choice(places)
    action = random.randrange(8)
    if action <= 3:
        node[key] = values(random)
    elif action == 4:
        del node[key]
    elif action == 5:
        other, there = random.choice(places)
        node[key] = json.loads(json.dumps(other[there]))
    elif isinstance(node, dict):
        node[random.choice(TEXTS)] = node.pop(key) if action == 6 else values(random)
    else:
        node.insert(
            random.randrange(len(node) + 1), json.loads(json.dumps(node[key])) if action == 6 else values(random)
        )
    return content


def bytes_changed(content: bytes, random: Random) -> bytes:
    """Returns bytes with some of them flipped, removed, doubled, cut off or put in."""
    text = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(text) + 1)
        size = random.choice((1, 1, 2, 8, 64))
        action = random.randrange(5)
        if action == 0 and at < len(text):
            text[at] ^= 1 << random.randrange(8)
        elif action == 1:
            del text[at : at + size]
        elif action == 2:
            text[at:at] = text[at : at + size]
        elif action == 3:
            del text[at:]
        else:
            text[at:at] = random.choice(
                (b"\xff" * size, b"\0" * size, b"[" * 2000, b"9" * 5000, b'"', b"\n", b": &a *a")
            )
    return bytes(text)


def changed_json(content: Any, random: Random) -> bytes:
    """Returns a JSON file made of `content` with one to three changes; one in five in its bytes."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = change(content, random)
    text = json.dumps(content).encode()
    return bytes_changed(text, random) if random.random() < 0.2 else text


def changed_safetensors(file: bytes, random: Random, metadata: tuple[str, ...] = ()) -> bytes:
    """Returns a safetensors file with changes in its header, in JSON inside its `metadata`, or in its bytes."""
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    action = random.randrange(5)
    if action == 0:
        return bytes_changed(file, random)
    if action <= 2 and metadata:
        key = random.choice(metadata)
        held = header["__metadata__"][key]
        header["__metadata__"][key] = changed_json(json.loads(held), random).decode(errors="replace")
        text = json.dumps(header).encode()
    else:
        text = changed_json(header, random)
    if random.random() < 0.3:
        data = bytes_changed(data, random) if data else data
    return len(text).to_bytes(8, "little") + text + data
