import numpy as np
import pytest
import torch

from saltflat.memory import Average

CPU = torch.device("cpu")


def write(memory, index, rows, labels=None, keep=None):
    keep = torch.ones(len(index), dtype=torch.bool) if keep is None else torch.tensor(keep)
    labels = torch.zeros(len(index), dtype=torch.int64) if labels is None else torch.tensor(labels)
    memory.write(torch.tensor(index), torch.as_tensor(rows, dtype=torch.float32), keep, labels)


def test_an_average_is_what_the_formula_says():
    generator = np.random.default_rng(0)
    memory = Average(4, 3, decay=0.75, storage="float32", device="cpu")
    mean, visits, seen = np.zeros((4, 3)), np.zeros(4), set()
    for epoch in range(12):
        memory.begin_epoch(epoch)
        for _ in range(3):
            index = generator.permutation(4)[:2]
            rows = generator.normal(size=(2, 3))
            write(memory, index.tolist(), rows)
            for i, row in zip(index, rows, strict=True):
                if (epoch, i) not in seen:
                    visits[i] += 1
                    mean[i] += max(1 / visits[i], 1 - 0.75) * (row - mean[i])
                    seen.add((epoch, i))
    got, valid = memory.read(torch.arange(4), CPU)
    assert valid.tolist() == (visits > 0).tolist()
    np.testing.assert_allclose(got.numpy(), mean, rtol=1e-5, atol=1e-6)
    assert memory.state()["visits"][0].tolist() == visits.tolist()


def test_the_first_write_of_an_epoch_counts():
    memory = Average(2, 1, decay=0.5, storage="float32", device="cpu")
    memory.begin_epoch(0)
    write(memory, [0, 0, 1], [[1.0], [5.0], [7.0]], [3, 4, 9], [True, True, False])
    write(memory, [0], [[9.0]], [6])
    got, valid = memory.read(torch.tensor([0, 1, 2]), CPU)
    assert got[0].item() == 1.0
    assert valid.tolist() == [True, False, False]
    assert memory.state()["labels"][0].tolist() == [3, -1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"decay": 1.0}, "decay.*got 1.0"),
        ({"decay": -0.1}, "decay.*got -0.1"),
        ({"decay": "0.9"}, "decay.*got '0.9'"),
        ({"storage": "uint8"}, "storage='uint8'"),
    ],
)
def test_bad_settings_of_an_average(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Average(2, 2, **kwargs)
