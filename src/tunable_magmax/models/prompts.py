"""Makes sentences of class names: templates with one place for the name, and names made readable.

A head averages over the sentences that a set of templates makes of a class name. Sets by name: those that CLIP's
authors used for CIFAR-100 (18) and for ImageNet and its relatives (80), one for intents of short requests, and the
bare name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tunable_magmax.data.samples import WORDNET_ID
from tunable_magmax.errors import InputError, closest, some_of

PLACE = "{}"
_ARTICLES = ("a", "the")
_TEMPLATE = re.compile(r"[^{}]*\{\}[^{}]*")


def _photos(qualities: str, looks: str) -> Iterable[str]:
    """Yields templates of photos with a quality, and of things with a look; each with "a" and "the"."""
    for article in _ARTICLES:
        yield f"a photo of {article} {PLACE}."
        yield from (f"a {quality} photo of {article} {PLACE}." for quality in qualities.split(", "))
        yield from (f"a photo of {article} {look} {PLACE}." for look in looks.split(", "))


def _renditions(kinds: str, materials: str) -> Iterable[str]:
    """Yields templates of works of art, and of things made of a material; each with "a" and "the"."""
    for article in _ARTICLES:
        yield from (f"{kind} of {article} {PLACE}." for kind in kinds.split(", "))
        yield from (f"{article} {material} {PLACE}." for material in materials.split(", "))
        yield f"{article} {PLACE} in a video game."


TEMPLATES: dict[str, tuple[str, ...]] = {
    "cifar100": tuple(_photos("blurry, black and white, low contrast, high contrast, bad, good", "small, big")),
    "imagenet-r": (
        *_photos(
            "bad, black and white, blurry, bright, close-up, cropped, dark, good, jpeg corrupted, low resolution, "
            "pixelated",
            "clean, cool, dirty, hard to see, large, nice, small, weird",
        ),
        *(f"a photo of {which} {PLACE}." for which in ("many", "my", "one")),
        *_renditions(  # "itap" is "I took a picture", a photography forum's word
            "a doodle, a drawing, a painting, a rendering, a rendition, a sculpture, a sketch, a tattoo, art, "
            "graffiti, itap",
            "cartoon, embroidered, origami, plastic, plushie, toy",
        ),
        f"itap of my {PLACE}.",
    ),
    # Among four-sets of twenty such sentences, one of the two best on CLINC150's validation split with MiniLM.
    "clinc150": (PLACE, f"{PLACE}.", f"a request: {PLACE}.", f"tell me about {PLACE}."),
    "plain": (PLACE,),
}


def read_templates(choice: str | Sequence[str]) -> tuple[str, ...]:
    """Returns a set of templates by its name, or checks those given: each has one place `{}` for the class name.

    >>> read_templates("plain"), len(read_templates("imagenet-r"))
    (('{}',), 80)
    >>> read_templates(["a scan of {}."])
    ('a scan of {}.',)
    """
    if isinstance(choice, str):
        if choice in TEMPLATES:
            return TEMPLATES[choice]
        hint = closest(choice, list(TEMPLATES))
        raise InputError(
            f"no prompt templates are called {choice!r}{hint}; known are {', '.join(TEMPLATES)}; templates of your own "
            "are a list"
        )
    templates = tuple(choice)
    wrong = [item for item in templates if not isinstance(item, str) or not _TEMPLATE.fullmatch(item)]
    if wrong or not templates:
        raise InputError(
            f"prompt templates need exactly one place {PLACE} for the class name and no other braces, such as 'a photo "
            f"of a {PLACE}.'; found {some_of(wrong, show=repr) if wrong else 'none'}"
        )
    return templates


def readable(class_name: str) -> str:
    """Returns a class name as people write it: underscores become spaces.

    >>> readable("pickup_truck")
    'pickup truck'
    """
    return " ".join(class_name.replace("_", " ").split())


def sentences(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Puts each class name into every template; refuses names that say nothing to a text encoder, or the same.

    >>> sentences(["aquarium_fish"], ["{}", "a photo of the {}."])
    ['aquarium fish', 'a photo of the aquarium fish.']
    """
    if class_names and all(WORDNET_ID.fullmatch(name) for name in class_names):
        raise InputError(
            f"the class names are WordNet numbers, such as {class_names[0]!r}, of which a text encoder knows nothing; "
            "give the classes' names in words"
        )
    seen: dict[str, str] = {}
    for name in class_names:
        if not readable(name):
            raise InputError(f"the class name {name!r} has nothing that can be read; give the class a name")
        if (other := seen.setdefault(readable(name), name)) != name:
            raise InputError(
                f"the classes {other!r} and {name!r} both read {readable(name)!r}, so a head cannot tell them apart; "
                "rename one"
            )
    return [template.replace(PLACE, name) for name in seen for template in templates]
