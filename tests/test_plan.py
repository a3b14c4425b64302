import pytest

from saltflat import SAF
from saltflat.codecs import CODECS
from saltflat.train.plan import LINKS, Plan, advice, plan_of, table

NVLINK, ETHERNET = LINKS


def test_one_process_sends_nothing():
    plan = Plan(processes=1)
    assert set(plan.messages("float16").values()) == {0}
    assert plan.seconds("float16", ETHERNET) == 0
    assert plan.share_bytes("uint8") == SAF.estimate_bytes(1_281_167, 1000, storage="uint8")


@pytest.mark.parametrize(("storage", "row"), [("float32", 404), ("float16", 202), ("uint8", 109)])
def test_messages_are_a_row_for_every_row_asked_for(storage, row):
    plan = Plan(classes=100, batch=32, processes=4)
    rows = 3 * 32 * row  # from three others, a row with its flag
    assert plan.messages(storage) == {"ask": 3 * 32 * 8, "fetch": rows, "count": 8, "give": rows}


def test_time_is_latency_and_bytes_over_bandwidth():
    plan = Plan(classes=1000, batch=128, processes=8, step_ms=100)
    rows = 7 * 128 * 1001 * 2
    expected = 3 * 20e-6 + (7 * 128 * 8 + rows + 8) / 450e9  # giving is hidden
    assert plan.seconds("float16", NVLINK) == pytest.approx(expected)


def test_what_the_backward_pass_does_not_hide_counts():
    short = Plan(classes=1000, batch=128, processes=8, step_ms=1e-6)
    long = Plan(classes=1000, batch=128, processes=8, step_ms=100)
    give = 20e-6 + 7 * 128 * 1001 * 2 / 450e9
    more = short.seconds("float16", NVLINK) - long.seconds("float16", NVLINK)
    assert more == pytest.approx(give, rel=1e-4)


def test_the_processes_of_a_machine_share_its_network_card():
    plan = Plan(classes=1000, batch=128, processes=16, per_machine=8)
    row = 1001 * 2
    # Eight processes each get a row for every row of eight others on the other machine.
    fetch = 8 * 8 * 128 * row
    expected = 3 * 100e-6 + (15 * 128 * 8 + fetch + 8) / 12.5e9
    assert plan.seconds("float16", ETHERNET) == pytest.approx(expected)


@pytest.mark.parametrize("storage", CODECS)
def test_from_enough_processes_on_saf_keeps_less_than_mesa(storage):
    plan = Plan()
    enough = plan.enough_processes(storage)
    assert Plan(processes=enough).share_bytes(storage) <= plan.teacher_bytes()
    assert Plan(processes=enough - 1).share_bytes(storage) > plan.teacher_bytes()


@pytest.mark.parametrize(
    ("numbers", "received", "messages"),
    [
        ({"processes": 1}, "0 B", "0"),
        ({"processes": 8, "buffers": 0}, "8 B", "1"),
        ({"processes": 8, "buffers": 100}, "408 B", "3"),
    ],
)
def test_mesa_sends_its_sums_and_batchnorms_statistics(numbers, received, messages):
    assert table(Plan(**numbers))[-1][2:4] == [received, messages]


def test_a_tiny_model_is_never_larger_than_the_outputs():
    assert Plan(parameters=10).enough_processes("uint8") is None
    assert table(Plan(parameters=10))[1][-1] == "never"


def test_gradients_share_the_link_that_giving_would_hide_on():
    plan = Plan(classes=1000, batch=128, processes=8, parameters=10**10)
    give = 20e-6 + 7 * 128 * 1001 * 2 / 450e9
    alone = Plan(classes=1000, batch=128, processes=8)
    more = plan.seconds("float16", NVLINK) - alone.seconds("float16", NVLINK)
    assert more == pytest.approx(give)


def test_one_machine_has_no_network_to_pass():
    assert table(Plan(processes=8))[1][5] == "one machine"
    assert table(Plan(processes=16))[1][5].endswith("%")


def test_the_advice_depends_on_the_numbers():
    assert advice(Plan()).startswith("SAF fits")
    large = plan_of({"samples": 14_200_000, "classes": 21_843, "processes": 64})
    assert "MESA is the right choice" in advice(large)
    assert len(table(large)) == 2 + len(CODECS)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"sample": 10}, "no 'sample': did you mean 'samples'"),
        ({"batch": 1.5}, "batch must be a whole number"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"step_ms": 0}, "step_ms must be positive"),
        ({"step_ms": float("inf")}, "step_ms must be positive"),
        ({"batch": float("inf")}, "batch must be a whole number"),
        ({"parameters": 0}, "parameters must be at least 1"),
    ],
)
def test_bad_numbers_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        plan_of(numbers)
