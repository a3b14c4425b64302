import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from saltflat import with_index


class Squares(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor(index**2), index % 3


def test_index_and_sample_travel_together_through_workers_and_shuffling():
    loader = DataLoader(with_index(Squares()), 6, shuffle=True, num_workers=2, prefetch_factor=3)
    seen = []
    for index, x, y in loader:
        assert torch.equal(index**2, x)
        assert torch.equal(index % 3, y)
        seen += index.tolist()
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (("x", "y"), (0, "x", "y")),
        (["x", "y"], (0, "x", "y")),
        ({"image": 1}, (0, {"image": 1})),
        ("x", (0, "x")),
    ],
)
def test_samples_of_any_kind(sample, expected):
    assert with_index([sample])[0] == expected


def test_counts_from_the_end_as_its_dataset_does():
    data = with_index(Squares())
    assert data[-1] == data.__getitems__([-1])[0] == data[19]
    assert len(data) == 20
    for index in (20, -21):
        with pytest.raises(IndexError, match=f"index {index} of a dataset of 20"):
            data[index]


def test_index_is_the_place_in_the_dataset_that_was_given():
    assert [i for i, *_ in with_index(Subset(Squares(), [7, 3, 5]))] == [0, 1, 2]


def test_asks_for_whole_batches_where_the_dataset_can_give_them():
    class Batched(Squares):
        asked = ()

        def __getitems__(self, indices):
            Batched.asked += (tuple(indices),)
            return [self[i] for i in indices]

    batches = list(DataLoader(with_index(Batched()), 10))
    assert [len(indices) for indices in Batched.asked] == [10, 10]
    assert torch.equal(batches[1][0], torch.arange(10, 20))


def test_samples_without_a_lasting_index_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(TypeError, match=r"Stream has no index .* or MESA"):
        with_index(Stream())


def test_tensor_dataset():
    index, x = with_index(TensorDataset(torch.arange(4) * 10))[2]
    assert (index, x.item()) == (2, 20)
