"""Templates have one place for the class name, and names are written as people write them."""

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.models.prompts import read_templates, sentences


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("cifar10", r"no prompt templates are called 'cifar10' \(did you mean 'cifar100'\?\); known are cifar100, "),
        ("a photo of {}.", "a photo of"),
        ([], "found none"),
        (["{}", "a photo.", "{} and {}", "a {name}.", 3], r"'a photo\.', '\{\} and \{\}', 'a \{name\}\.', 3"),
    ],
)
def test_bad_templates(given, says):
    with pytest.raises(InputError, match=says):
        read_templates(given)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["n01443537", "n01484850"], "WordNet numbers, such as 'n01443537'.*give the classes' names in words"),
        (["palm_tree", "palm tree"], "'palm_tree' and 'palm tree' both read 'palm tree'"),
        (["cat", "__"], "'__' has nothing that can be read"),
    ],
)
def test_names_that_say_nothing(names, says):
    with pytest.raises(InputError, match=says):
        sentences(names, ["{}"])
