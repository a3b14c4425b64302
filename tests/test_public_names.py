"""The public names and their signatures, against the list beside this file.

After a change that is meant:

    python tests/test_public_names.py > tests/public_names.txt
"""

import importlib
import inspect
import re
from pathlib import Path

ROOMS = [
    *("", ".terms", ".memory", ".teacher", ".sam", ".sharpness", ".landscape"),
    *(f".integrations.{name}" for name in ("lightning", "transformers", "timm", "accelerate")),
]
LISTED = [
    (room, name)
    for room in ROOMS
    for name in importlib.import_module(f"saltflat{room}").__all__
    if inspect.isclass(getattr(importlib.import_module(f"saltflat{room}"), name))
]


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
    """Those of the class, and of its bases up to the first that is listed itself."""
    listed = {getattr(importlib.import_module(f"saltflat{r}"), n) for r, n in LISTED}
    found = {}
    for base in owner.__mro__:
        if not base.__module__.startswith("saltflat") or (base is not owner and base in listed):
            break
        for name, value in vars(base).items():
            own = not inspect.isfunction(value) or value.__qualname__.startswith(base.__name__)
            # torch hangs its own wrapper of `step` on a class of optimizers.
            if own and not name.startswith("_"):
                value = value.__func__ if isinstance(value, staticmethod) else value
                found.setdefault(name, name + (signature(value) if callable(value) else ""))
    yield from found.values()


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
