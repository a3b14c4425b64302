import pytest

from saltflat.core import registry
from saltflat.core.registry import Part, register, registered


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))


def test_a_name_builds_what_was_registered():
    @register("term", "thin", passes="1 + 1", paper="Nobody, 2026")
    class Thin:
        pass

    entry = registered("term")["thin"]
    assert (entry.build, entry.passes, entry.paper) == (Thin, "1 + 1", "Nobody, 2026")
    assert "thin" not in registered("optimizer")


def test_a_name_is_given_once_for_each_kind():
    register("task", "one")(dict)
    register("data", "one")(dict)
    with pytest.raises(ValueError, match=r"task 'one'"):
        register("task", "one")(list)
    assert registered("task")["one"].build is dict


def test_what_is_registered_cannot_be_changed_by_hand():
    with pytest.raises(TypeError):
        registered("term")["saf"] = None


def test_a_part_is_known_by_what_it_has():
    class Ours:
        nbytes = 0

        def graph_key(self):
            return ()

        def tick(self):
            pass

    assert isinstance(Ours(), Part)
    assert not isinstance(object(), Part)
