import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from saltflat.memory import indexed_loader, split_index, with_index, with_index_column


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
        with pytest.raises(IndexError, match=f"{index}.*20"):
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

    with pytest.raises(TypeError, match=r"Stream.*MESA"):
        with_index(Stream())


def test_tensor_dataset():
    index, x = with_index(TensorDataset(torch.arange(4) * 10))[2]
    assert (index, x.item()) == (2, 20)


def joined(samples):
    """A collate function of one's own."""
    return {"x": torch.stack([x for x, _ in samples]), "y": [y for _, y in samples]}


@pytest.mark.parametrize(
    "order",
    [
        {"batch_size": 6, "shuffle": True, "drop_last": True},
        {"batch_sampler": [[3, 1], [2, 19, 2]]},
        {"batch_size": 4, "num_workers": 1, "collate_fn": joined},
    ],
)
def test_a_loader_made_elsewhere_yields_its_own_batches_with_their_index(order):
    def seeded():
        return DataLoader(Squares(), generator=torch.Generator().manual_seed(3), **order)

    for (index, batch), expected in zip(indexed_loader(seeded()), seeded(), strict=True):
        x, y = batch.values() if isinstance(batch, dict) else batch
        assert type(batch) is type(expected)
        assert torch.equal(torch.as_tensor(x), index**2)
        assert torch.equal(torch.as_tensor(y), index % 3)
        x_alone, _ = expected.values() if isinstance(expected, dict) else expected
        assert torch.equal(x, x_alone)


def test_a_loader_that_makes_no_batches():
    with pytest.raises(ValueError, match="batch_size=None"):
        indexed_loader(DataLoader(Squares(), batch_size=None))


def test_a_loader_that_cannot_be_made_again():
    class Ours(DataLoader):
        """Which would lose what is its own."""

    with pytest.raises(TypeError, match=r"Ours.*with_index\(dataset\)"):
        indexed_loader(Ours(Squares(), 4))
    with pytest.raises(TypeError, match=r"DataLoader.*got a dict"):
        indexed_loader({"one": DataLoader(Squares(), 4)})


@pytest.mark.parametrize("data", [with_index(Squares()), with_index_column([{"x": 1}])])
def test_a_loader_whose_batches_carry_an_index_stays(data):
    loader = DataLoader(data, 4)
    assert indexed_loader(loader) is loader
    twice = indexed_loader(DataLoader(Squares(), 4))
    assert indexed_loader(twice) is twice


@pytest.mark.parametrize("rest", [["x", "y"], [{"x": 1}], [["x", "y"]]])
def test_what_was_added_to_a_batch_is_taken_off(rest):
    index = torch.tensor([3, 1])
    got, batch = split_index([index, *rest])
    assert got is index
    assert batch == (rest if len(rest) > 1 else rest[0])
    got, batch = split_index({"index": index, "x": 1})
    assert got is index and batch == {"x": 1}


@pytest.mark.parametrize("batch", [[torch.rand(3), 1], [torch.ones(3, 2).int(), 1], {"x": 1}, 7])
def test_a_batch_without_an_index_is_refused(batch):
    with pytest.raises(ValueError, match=f"index.*{type(batch).__name__}"):
        split_index(batch)


def test_a_column_for_dictionaries():
    rows = [{"x": 4}, {"x": 9}]
    data = with_index_column(rows)
    assert list(data) == data.__getitems__([0, -1]) == [{"x": 4, "index": 0}, {"x": 9, "index": 1}]
    own = with_index_column([{"x": 4, "index": 7}])
    assert own[0] == with_index_column(own)[0] == {"x": 4, "index": 7}


def test_no_sample_is_looked_at():
    """Or one that draws random numbers would have the training begin with others."""

    class Careful(list):
        def __getitem__(self, index):
            raise AssertionError("looked")

    assert len(with_index_column(Careful([{"x": 1}]))) == 1


@pytest.mark.oracle
def test_no_row_of_datasets_is_looked_at():
    from datasets import Dataset as Table

    looked = []
    data = Table.from_dict({"x": [1, 2, 3]})
    with_index_column(data.with_transform(lambda rows: looked.append(rows) or rows))
    assert not looked


@pytest.mark.oracle
def test_columns_of_datasets():
    from datasets import Dataset as Table

    data = Table.from_dict({"x": [1, 2, 3]})
    expected = [{"x": 1, "index": 0}, {"x": 2, "index": 1}, {"x": 3, "index": 2}]
    assert list(with_index_column(data)) == expected
    numbered = data.add_column("index", [5, 3, 4])
    assert with_index_column(numbered) is numbered
    only_x = data.with_format("torch", columns=["x"])
    assert [row["index"] for row in with_index_column(only_x)] == [0, 1, 2]
    doubled = data.with_transform(lambda rows: {"y": [2 * x for x in rows["x"]]})
    assert list(with_index_column(doubled)) == [{"index": i, "y": 2 * i + 2} for i in range(3)]


@pytest.mark.oracle
@pytest.mark.parametrize("column", [[0, 1, 0], ["a", "b", "c"], [0.0, 1.0, 2.0], [[0], [1], [2]]])
def test_a_column_that_does_not_number_the_samples(column):
    from datasets import Dataset as Table

    data = Table.from_dict({"x": [1, 2, 3], "index": column})
    with pytest.raises(ValueError, match=r"'index'.*remove_columns"):
        with_index_column(data)
