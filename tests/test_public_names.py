"""The public names and their signatures, against the list beside this file.

After a change that is meant:

    python tests/test_public_names.py > tests/public_names.txt
"""

import importlib
import inspect
import re
from pathlib import Path

ROOMS = ["", ".terms", ".memory", ".teacher", ".sam", ".sharpness", ".landscape"]


def names():
    """Each public name with its signature, and the public methods of each class."""
    for room in ROOMS:
        module = importlib.import_module(f"saltflat{room}")
        yield f"# saltflat{room}"
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if inspect.isclass(thing) and room:
                yield f"{name}{signature(thing)}"
                yield from sorted(f"    .{line}" for line in members(thing))
            elif callable(thing):
                yield f"{name}{signature(thing)}"
            else:
                yield name


def signature(thing):
    try:
        text = str(inspect.signature(thing))
    except ValueError:
        return ""
    return re.sub(r" at 0x\w+", "", text.replace("'", ""))  # a function's address, annotations


def members(owner):
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        if isinstance(value, staticmethod):
            value = value.__func__
        if inspect.isfunction(value) and not value.__qualname__.startswith(owner.__name__):
            continue  # torch hangs its own wrapper of `step` on a class of optimizers
        yield name + (signature(value) if inspect.isfunction(value) else "")


def test_public_names_and_signatures_are_the_listed_ones():
    listed = Path(__file__).with_name("public_names.txt").read_text()
    assert "\n".join(names()) + "\n" == listed


def test_every_public_name_is_documented():
    for room in ROOMS:
        module = importlib.import_module(f"saltflat{room}")
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                assert thing.__doc__, f"saltflat{room}.{name}"


if __name__ == "__main__":
    print("\n".join(names()))
