import hashlib
import pickle
import sys

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, CIFAR100

from saltflat.train import augment
from saltflat.train.config import DataConfig
from saltflat.train.data import load_data, noisy


def pixels(*shape):
    return np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)


def sample_set(dataset):
    """A dataset as a set of (image, label), whatever its order."""
    return {(image.numpy().tobytes(), label) for image, label in dataset}


def test_digits():
    data = load_data(DataConfig())
    assert (len(data.train), len(data.test)) == (1000, 797)
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 8)
    digits = load_digits()
    originals = {
        (np.float32(image / 16).tobytes(), int(label))
        for image, label in zip(digits.images, digits.target, strict=True)
    }
    assert sample_set(data.train) | sample_set(data.test) == originals
    assert not sample_set(data.train) & sample_set(data.test)
    assert data.train.labels.bincount().min() > 80  # shuffled
    images = np.stack([image.numpy() for image, _ in data.train]).astype(float)
    assert data.mean[0] == pytest.approx(images.mean())
    assert data.std[0] == pytest.approx(images.std())


def test_train_size_of_digits_is_the_start_of_one_fixed_order():
    small, default = load_data(DataConfig(train_size=100)), load_data(DataConfig())
    assert (len(small.train), len(small.test)) == (100, 1697)
    assert torch.equal(small.train.images, default.train.images[:100])
    with pytest.raises(ValueError, match="train_size 1797 leaves none of the 1797 digits"):
        load_data(DataConfig(train_size=1797))


def test_a_holdout_is_of_the_training_samples_and_leaves_the_test_set_alone():
    whole = load_data(DataConfig())
    data = load_data(DataConfig(holdout=200, label_noise=0.5))
    assert (len(data.train), len(data.test)) == (800, 200)
    again = load_data(DataConfig(holdout=200))
    assert torch.equal(data.test.images, again.test.images)
    assert torch.equal(data.test.labels, again.test.labels)  # no noise there
    assert sample_set(again.train) | sample_set(again.test) == sample_set(whole.train)
    assert not sample_set(again.train) & sample_set(again.test)
    with pytest.raises(ValueError, match="holdout 1000 leaves none of the 1000 samples to train"):
        load_data(DataConfig(holdout=1000))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.999])
def test_label_noise_is_an_exact_share_and_never_the_true_class(share):
    clean, noised = load_data(DataConfig()), load_data(DataConfig(label_noise=share))
    wrong = clean.train.labels != noised.train.labels
    assert wrong.sum() == round(share * 1000)
    assert torch.equal(clean.test.labels, noised.test.labels)
    assert torch.equal(clean.train.images, noised.train.images)
    assert torch.equal(load_data(DataConfig(label_noise=share)).train.labels, noised.train.labels)
    assert noised.train[5][1] == noised.train.labels[5]


def test_label_noise_is_uniform_over_the_other_classes_and_has_a_seed():
    true = torch.arange(30_000) % 3
    noised = noisy(true, num_classes=3, share=0.5, seed=0)
    for label in range(3):
        counts = noised[true == label].bincount(minlength=3)
        assert abs(counts[label] - 5000) < 300  # which samples: 5 deviations are 250
        others = counts[[k for k in range(3) if k != label]]
        assert (others - others.double().mean()).abs().max() < 5 * 2500**0.5
    assert not torch.equal(noised, noisy(true, 3, 0.5, seed=1))
    assert torch.equal(true, torch.arange(30_000) % 3)


def arrays(**changes):
    """What a good .npz file holds, with some of it changed or, where None, left out."""
    good = {
        "x_train": pixels(20, 6, 6, 3),
        "y_train": np.arange(20) % 4,
        "x_test": pixels(8, 6, 6, 3),
        "y_test": np.arange(8) % 4,
    } | changes
    return {key: value for key, value in good.items() if value is not None}


def saved(tmp_path, **changes):
    file = tmp_path / "some.npz"
    np.savez(file, **arrays(**changes))
    return str(file)


def test_synthetic():
    data = load_data(DataConfig("synthetic:16:10"))
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 3, 16)
    assert (len(data.train), len(data.test)) == (2048, 256)
    assert data.train.images.shape == (2048, 3, 16, 16)
    assert data.train.images.dtype == torch.uint8
    assert data.train.labels.bincount().tolist() == [205] * 8 + [204] * 2
    assert len(data.test.labels.unique()) == 10
    assert not sample_set(data.train) & sample_set(data.test)
    deviation = ((256**2 - 1) / 12) ** 0.5 / 255  # of bytes that are all as likely
    assert data.mean == pytest.approx((0.5,) * 3, abs=2e-3)
    assert data.std == pytest.approx((deviation,) * 3, rel=5e-3)
    again = load_data(DataConfig("synthetic:16:10"))
    assert torch.equal(data.train.images, again.train.images)


def test_synthetic_of_more_classes_than_samples():
    data = load_data(DataConfig("synthetic:2:1000:6"))
    assert (len(data.train), data.num_classes) == (6, 1000)
    assert len(load_data(DataConfig("synthetic:2:3:6", train_size=4)).train) == 4
    assert set(load_data(DataConfig("synthetic:2:6:6")).train.labels.tolist()) == set(range(6))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("synthetic", "is not of the form synthetic:SIDE:CLASSES"),
        ("synthetic:32", "is not of the form"),
        ("synthetic:32:ten", "is not of the form"),
        ("synthetic:32:10:", "is not of the form"),
        ("synthetic:32:10:-5", "is not of the form"),
        ("synthetic:0:10", "SIDE must be at least 1, CLASSES and SAMPLES at least 2"),
        ("synthetic:8:1", "SIDE must be at least 1, CLASSES and SAMPLES at least 2"),
        ("synthetic:8:10:1", "SIDE must be at least 1, CLASSES and SAMPLES at least 2"),
    ],
)
def test_synthetic_with_something_wrong(name, problem):
    with pytest.raises(ValueError, match=rf"{name}.*{problem}"):
        load_data(DataConfig(name))


def test_npz_of_bytes(tmp_path):
    data = load_data(DataConfig(saved(tmp_path)))
    assert (data.num_classes, data.in_channels, data.image_size) == (4, 3, 6)
    expected = arrays()["x_train"]
    for i, (image, label) in enumerate(data.train):
        assert (image.numpy() == expected[i].transpose(2, 0, 1)).all()
        assert (image.dtype, label, type(label)) == (torch.uint8, i % 4, int)
    assert data.mean == pytest.approx(expected.mean((0, 1, 2)) / 255)
    assert data.std == pytest.approx(expected.std((0, 1, 2)) / 255)
    assert len(data.test) == 8


def test_npz_of_floats_without_channels(tmp_path):
    x = np.linspace(-1, 3, 20 * 36).reshape(20, 6, 6)
    data = load_data(DataConfig(saved(tmp_path, x_train=x, x_test=x[:8]), train_size=7))
    assert (data.in_channels, len(data.train), data.num_classes) == (1, 7, 4)
    assert data.train[3][0].dtype == torch.float32
    assert data.mean == pytest.approx((x[:7].mean(),))
    assert data.std == pytest.approx((x[:7].std(),))


def test_a_channel_that_never_changes_stays_finite(tmp_path):
    data = load_data(DataConfig(saved(tmp_path, x_train=np.full((20, 6, 6, 3), 7, np.uint8))))
    images, _ = next(augment.test_batches(data, 8))
    assert data.std == (1.0, 1.0, 1.0)
    assert images.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"y_test": None}, "has no y_test, only x_train, y_train, x_test"),
        ({"x_train": pixels(20, 3, 6, 6)}, r"x_train is not square.*shape \(20, 3, 6, 6\)"),
        ({"x_train": pixels(20, 36)}, r"x_train is not square.*shape \(20, 36\)"),
        ({"x_train": pixels(0, 6, 6, 3), "y_train": np.arange(0)}, "x_train is not square"),
        ({"x_test": pixels(8, 6, 6)}, "x_train and x_test differ"),
        ({"x_test": pixels(8, 6, 6, 3) / 255}, "x_train and x_test differ"),
        ({"x_train": pixels(20, 6, 6, 3).astype(int)}, "x_train must be uint8 or float, is int64"),
        ({"x_train": np.full((20, 6, 6, 3), np.nan)}, "x_train has values that are not finite"),
        ({"x_train": np.array([object()])}, "Object arrays cannot be loaded"),
        ({"y_train": np.arange(20.0) % 4}, "y_train must be whole numbers, is float64"),
        ({"y_train": np.arange(20) > 4}, "y_train must be whole numbers, is bool"),
        ({"y_train": np.arange(19) % 4}, r"y_train must be one label for each of 20.*\(19,\)"),
        ({"y_test": np.eye(8, dtype=int)}, r"y_test must be one label for each of 8.*\(8, 8\)"),
        ({"y_train": np.arange(20) % 4 - 1}, "labels must be 0 or more, got -1"),
        ({"y_test": np.arange(8) - 2}, "labels must be 0 or more, got -2"),
        ({"y_test": np.arange(8)}, "no training sample has test label 7"),
        ({"y_train": np.arange(20) % 4 * 2}, "no training sample has label 1, but one 6"),
        (
            {"y_train": np.zeros(20, int), "y_test": np.zeros(8, int)},
            "all samples are of one class",
        ),
    ],
)
def test_npz_with_something_wrong(tmp_path, changes, problem):
    file = saved(tmp_path, **changes)
    with pytest.raises(ValueError, match=problem) as caught:
        load_data(DataConfig(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert str(caught.value).count("\n") <= 1


def test_files_that_are_no_npz(tmp_path):
    with pytest.raises(ValueError, match=r"none\.npz: no such file"):
        load_data(DataConfig(str(tmp_path / "none.npz")))
    (tmp_path / "text.npz").write_text("x_train")
    with pytest.raises(ValueError, match=r"text\.npz: not an \.npz file"):
        load_data(DataConfig(str(tmp_path / "text.npz")))


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_images_in_memory_are_resized(tmp_path, kind):
    """To half their side: for bytes and floats alike about the mean of four pixels."""
    ramp = np.tile(np.arange(0, 160, 10, dtype=kind), (20, 16, 1))[..., None]
    file = str(tmp_path / "ramps.npz")
    labels = np.arange(20) % 2
    np.savez(file, x_train=ramp, y_train=labels, x_test=ramp, y_test=labels)
    data = load_data(DataConfig(file, image_size=8))
    assert data.image_size == 8
    for images in (data.train.images, data.test.images):
        assert images.shape == (20, 1, 8, 8) and images.numpy().dtype == kind
        inside = images[:, 0, :, 1:-1].double()  # at the edges there is less to average
        expected = torch.arange(5.0, 160, 20)[1:-1].double()
        torch.testing.assert_close(inside, expected.expand_as(inside), atol=1.0, rtol=0.0)
    scale = 255 if kind is np.uint8 else 1
    torch.testing.assert_close(data.mean[0], data.train.images.double().mean().item() / scale)
    assert load_data(DataConfig(file, image_size=16)).train.images.dtype == images.dtype


def test_sizes_that_do_not_fit(tmp_path):
    file = saved(tmp_path)
    with pytest.raises(ValueError, match=r"train_size 21 exceeds the 20 of .*some.npz"):
        load_data(DataConfig(file, train_size=21))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digit", "did you mean 'digits'"),
        ("cifar", "did you mean 'cifar10'"),
        ("no/such", "hf:NAME"),
        ("synthetc:32:10", "did you mean 'synthetic:SIDE:CLASSES'"),
    ],
)
def test_unknown_names(name, hint):
    with pytest.raises(
        ValueError, match=rf"data '{name}' is no known name and no folder: .*{hint}"
    ):
        load_data(DataConfig(name))


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("digits", "sklearn.datasets", r"pip install 'saltflat\[train\]'"),
        ("cifar10", "torchvision", r"pip install 'saltflat\[train\]'"),
        (".", "torchvision.datasets", r"pip install 'saltflat\[train\]'"),
        ("hf:mnist", "datasets", "pip install datasets"),
    ],
)
def test_a_missing_package_is_named_with_its_command(monkeypatch, name, module, command):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{module.partition('.')[0]}.*{command}"):
        load_data(DataConfig(name))


@pytest.mark.parametrize(("kind", "classes"), [(CIFAR10, 10), (CIFAR100, 100)])
def test_cifar(tmp_path, monkeypatch, kind, classes):
    """In the layout of the official archive, with a checksum for each file."""
    folder = tmp_path / kind.base_folder
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    flat = pixels(60, 3072)
    key = "labels" if classes == 10 else "fine_labels"
    parts = {"train_list": flat[:50], "test_list": flat[50:]}
    for which, rows in parts.items():
        names = [name for name, _ in getattr(kind, which)]
        chunks = np.array_split(rows, len(names))
        contents = [{"data": c, key: [int(row[0]) % classes for row in c]} for c in chunks]
        sums = [[name, write(name, c)] for name, c in zip(names, contents, strict=True)]
        monkeypatch.setattr(kind, which, sums)
    md5 = write(kind.meta["filename"], {kind.meta["key"]: [str(i) for i in range(classes)]})
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5})

    data = load_data(DataConfig(kind.__name__.lower(), root=str(tmp_path), train_size=40))
    assert (data.num_classes, data.in_channels, data.image_size) == (classes, 3, 32)
    assert (len(data.train), len(data.test)) == (40, 10)
    for rows, part in ((flat, data.train), (flat[50:], data.test)):
        for row, (image, label) in zip(rows, part, strict=False):
            assert (image.numpy() == row.reshape(3, 32, 32)).all()
            assert label == row[0] % classes
    assert 0.4 < min(data.mean) < max(data.mean) < 0.6


def write_image(path, level, size=(12, 9), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level,) * 3).save(path)


def image_folder(root, train, test, held="val"):
    """Grey pictures: the level says the class, tens, and the sample, ones."""
    for split, classes in (("train", train), (held, test)):
        for name, number in classes.items():
            for i in range(4):
                path = root / split / name / f"{i}.png"
                write_image(path, 10 * number + i, size=(12 + i, 9), mode="L" if i else "RGB")
    return str(root)


@pytest.mark.parametrize("held", ["val", "test"])
def test_folder(tmp_path, held):
    root = image_folder(tmp_path, {"ant": 0, "bee": 1, "cat": 2}, {"ant": 0, "cat": 2}, held)
    data = load_data(DataConfig(root, image_size=8, augment="inception", batch_size=3))
    assert (data.num_classes, data.in_channels, data.image_size) == (3, 3, 8)
    assert (len(data.train), len(data.test)) == (12, 8)
    for split in (data.train, data.test):
        for image, label in split:
            level = int(image[0, 0, 0])
            assert image.dtype == torch.uint8
            assert image.shape == (3, 9, 12 + level % 10)
            assert label == level // 10
    assert [label for _, label in data.test] == [0] * 4 + [2] * 4
    assert load_data(DataConfig(root)).image_size == 224
    few = load_data(DataConfig(root, train_size=6)).train
    assert len(few) == 6
    assert len(set(few.labels.tolist())) == 3  # not the first class only
    held_out = load_data(DataConfig(root, holdout=5))
    assert (len(held_out.train), len(held_out.test)) == (7, 5)
    parts = sample_set(held_out.train), sample_set(held_out.test)
    assert parts[0] | parts[1] == sample_set(data.train) and not parts[0] & parts[1]


def test_files_are_loaded_and_augmented_by_workers(tmp_path):
    root = image_folder(tmp_path, {"ant": 0, "bee": 1}, {"ant": 0})
    config = DataConfig(root, image_size=8, augment="inception", batch_size=3, workers=2)
    data = load_data(config)
    for index, images, labels, *_ in augment.TrainLoader(data, config, 0).batches(0):
        raw = torch.stack([data.train[i][0][:, :1, :1] for i in index.tolist()])
        assert torch.equal(
            images, augment.normalised(raw, *augment.statistics(data)).expand(3, 3, 8, 8)
        )
        assert torch.equal(labels, raw[:, 0, 0, 0] // 10)
    ((images, labels),) = augment.test_batches(data, 100)
    assert (images.shape, labels.tolist()) == ((4, 3, 8, 8), [0] * 4)


def test_folders_with_something_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"needs folders train and val \(or test\), has neither"):
        load_data(DataConfig(str(tmp_path)))
    image_folder(tmp_path, {"ant": 0}, {"ant": 0})
    with pytest.raises(ValueError, match="all samples are of one class"):
        load_data(DataConfig(str(tmp_path)))
    image_folder(tmp_path, {"bee": 1}, {"cow": 2})
    with pytest.raises(ValueError, match=r"val has classes that train has not: \['cow'\]"):
        load_data(DataConfig(str(tmp_path)))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that writes splits of a dataset and gives the name to load them by."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def write(features, **splits):
        folder = tmp_path / "set"
        folder.mkdir()
        for split, columns in splits.items():
            table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
            table.to_parquet(folder / f"{split}.parquet")
        return f"hf:{folder}"

    return write


def pictures(*levels):
    return [Image.new("L", (9, 12), level) for level in levels]


IMAGE, CLASSES = datasets.Image(), datasets.ClassLabel(names=["ant", "bee"])
INT, TEXT = datasets.Value("int64"), datasets.Value("string")


@pytest.mark.parametrize("held", ["test", "validation"])
@pytest.mark.parametrize("column", ["label", "kind"])
def test_hub(hub, held, column):
    train = {"id": [5, 6, 7], "picture": pictures(0, 101, 2), column: [0, 1, 0]}
    test = {"id": [8, 9], "picture": pictures(3, 104), column: [0, 1]}
    name = hub({"id": INT, "picture": IMAGE, column: CLASSES}, **{"train": train, held: test})
    data = load_data(DataConfig(name, image_size=8))
    assert (data.num_classes, data.in_channels, data.image_size) == (2, 3, 8)
    for split, levels in ((data.train, [0, 101, 2]), (data.test, [3, 104])):
        assert [int(image[2, 0, 0]) for image, _ in split] == levels
        assert [label for _, label in split] == [level // 100 for level in levels]
        assert split[0][0].shape == (3, 12, 9)
    assert len(load_data(DataConfig(name, train_size=2)).train) == 2


def test_hub_tests_on_validation_where_the_test_labels_are_hidden(hub):
    def split(*labels):
        return {"image": pictures(*range(len(labels))), "label": list(labels)}

    name = hub(
        {"image": IMAGE, "label": INT}, train=split(0, 1), validation=split(1), test=split(-1, -1)
    )
    assert [label for _, label in load_data(DataConfig(name)).test] == [1]


def test_hub_reads_a_folder_of_images(hub, tmp_path):
    root = image_folder(tmp_path / "pictures", {"ant": 0, "bee": 1}, {"ant": 0, "bee": 1}, "test")
    data = load_data(DataConfig(f"hf:{root}"))
    assert (len(data.train), len(data.test), data.num_classes) == (8, 8, 2)
    assert {int(image[0, 0, 0]) // 10 - label for image, label in data.train} == {0}


@pytest.mark.parametrize(
    ("label", "held", "problem"),
    [
        (INT, "extra", r"needs splits train and test \(or validation\), has"),
        (TEXT, "test", "needs a column of images and a whole-number label, has"),
        (INT, "test", "no training sample has label 0, but one 2"),
    ],
)
def test_hub_with_something_wrong(hub, label, held, problem):
    rows = {"image": pictures(0, 1), "label": [1, 2] if label is INT else ["ant", "bee"]}
    with pytest.raises(ValueError, match=problem):
        load_data(DataConfig(hub({"image": IMAGE, "label": label}, **{"train": rows, held: rows})))
