import math

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as torchvision_functional

from saltflat.train import augment
from saltflat.train.augment import Share, TrainLoader
from saltflat.train.config import DataConfig
from saltflat.train.data import Data, Labelled


def data_of(images, test=None, mean=0.0, std=1.0):
    """Images whose label is their index mod 4."""
    channels, _, size = images[0].shape
    train = Labelled(images, torch.arange(len(images)) % 4)
    return Data(train, test or train, 4, channels, size, (mean,) * channels, (std,) * channels)


def numbered(samples=23, size=8):
    """Images that say which sample they are, in each pixel."""
    return data_of(torch.arange(1.0, samples + 1).view(-1, 1, 1, 1).expand(-1, 1, size, size))


def random_images(samples=23, size=8, channels=3):
    return torch.randn(samples, channels, size, size, generator=torch.Generator().manual_seed(0))


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        for a, b in zip(one[:3], other[:3], strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        assert (one.mixed is None) == (other.mixed is None)
        if one.mixed:
            assert one.mixed.share == other.mixed.share
            assert torch.equal(one.mixed.partner, other.mixed.partner)
        assert (one.view is None) == (other.view is None)
        assert one.view is None or torch.equal(one.view, other.view)


@pytest.mark.parametrize("workers", [0, 2])
def test_index_image_and_label_travel_together(workers):
    loader = TrainLoader(numbered(), DataConfig(batch_size=5, workers=workers), seed=0)
    assert len(loader) == 4
    for epoch in range(2):
        seen = []
        for index, images, labels, mixed, _ in loader.batches(epoch):
            assert images.dtype == torch.float32
            assert index.dtype == labels.dtype == torch.int64
            assert torch.equal(images, (index + 1.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8))
            assert torch.equal(labels, index % 4)
            assert mixed is None
            seen += index.tolist()
        assert len(seen) == len(set(seen)) == 20


EVERYTHING = {"cutout": 3, "mixup": 0.5, "cutmix": 0.5, "batch_size": 3}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["none", "basic", "inception"])
def test_an_epoch_goes_on_from_any_step_bit_for_bit(kind, workers):
    data = data_of(random_images())
    one = TrainLoader(data, DataConfig(augment=kind, **EVERYTHING), seed=5)
    loader = TrainLoader(data, DataConfig(augment=kind, workers=workers, **EVERYTHING), seed=5)
    whole = list(one.batches(2, views=True))
    assert_same(whole, list(loader.batches(2, views=True)))
    assert_same(whole[3:], list(loader.batches(2, skip=3, views=True)))
    without = [batch._replace(view=None) for batch in whole]
    assert_same(without, list(loader.batches(2)))
    assert list(loader.batches(2, skip=7)) == []


def test_epochs_and_seeds_differ_and_repeat():
    data, config = data_of(random_images()), DataConfig(augment="basic", batch_size=23)

    def by_index(seed, epoch):
        (batch,) = TrainLoader(data, config, seed).batches(epoch)
        return batch.index, batch.images[batch.index.argsort()]

    runs = {key: by_index(*key) for key in [(0, 0), (0, 1), (1, 0), (-1, 0)]}
    for key, (index, images) in runs.items():
        again = by_index(*key)
        assert torch.equal(index, again[0])
        assert torch.equal(images, again[1])
        for other in runs.keys() - {key}:
            assert not torch.equal(index, runs[other][0])
            assert not torch.equal(images, runs[other][1])


def test_what_happens_to_a_sample_does_not_depend_on_its_batch():
    data = data_of(random_images())

    def epoch(batch_size):
        config = DataConfig(augment="inception", cutout=3, batch_size=batch_size)
        batches = list(TrainLoader(data, config, seed=0).batches(0))
        return torch.cat([b.index for b in batches]), torch.cat([b.images for b in batches])

    (index, images), (other_index, others) = epoch(11), epoch(2)
    assert torch.equal(index, other_index)
    assert torch.equal(images, others)


@pytest.mark.parametrize("kind", ["basic", "inception"])
def test_another_view_is_of_the_same_samples_augmented_apart(kind):
    """Its numbers are as random as the first's, and not the same; nor is it another epoch's."""
    data = data_of(random_images(400))
    loader = TrainLoader(data, DataConfig(augment=kind, batch_size=400), seed=0)
    (batch,), (later,) = (loader.batches(epoch, views=True) for epoch in (0, 1))
    different = (batch.images != batch.view).flatten(1).any(1)
    assert different.double().mean() > 0.9
    assert not torch.equal(batch.view[batch.index.argsort()], later.images[later.index.argsort()])
    # Without what is random, the two are one.
    plain = TrainLoader(data, DataConfig(batch_size=400), seed=0)
    (batch,) = plain.batches(0, views=True)
    assert torch.equal(batch.images, batch.view)


@pytest.mark.parametrize("alphas", [{"mixup": 0.5}, {"cutmix": 1.0}])
def test_the_view_is_mixed_as_the_images_are(alphas):
    loader = TrainLoader(data_of(random_images(40)), DataConfig(batch_size=4, **alphas), seed=0)
    mixed = [batch for batch in loader.batches(0, views=True) if batch.mixed is not None]
    assert mixed
    for batch in mixed:  # nothing else was done to either
        assert torch.equal(batch.images, batch.view)


def test_loading_leaves_the_global_generators_alone():
    np_state = np.random.get_state()[1].copy()
    state = torch.get_rng_state()
    list(TrainLoader(numbered(), DataConfig(augment="basic", **EVERYTHING), 0).batches(0))
    list(augment.test_batches(numbered(), 4))
    assert torch.equal(state, torch.get_rng_state())
    assert (np_state == np.random.get_state()[1]).all()


def slow_basic(image, down, across, flip):
    """Pad by an eighth, crop, flip; a pixel at a time."""
    channels, side, _ = image.shape
    result = torch.zeros_like(image)
    for c in range(channels):
        for row in range(side):
            for column in range(side):
                y = row + down - side // 8
                x = (side - 1 - column if flip else column) + across - side // 8
                if 0 <= y < side and 0 <= x < side:
                    result[c, row, column] = image[c, y, x]
    return result


def test_basic_is_a_padded_crop_and_a_flip_and_every_one_is_as_likely():
    images = random_images(samples=12, size=16, channels=1)
    config = DataConfig(augment="basic", batch_size=12)
    choices = [(d, a, f) for d in range(5) for a in range(5) for f in (False, True)]
    possible = {  # of each image, every outcome there is
        i: torch.stack([slow_basic(image, *choice) for choice in choices])
        for i, image in enumerate(images)
    }
    counts = torch.zeros(len(choices))
    epochs = 200
    for epoch in range(epochs):
        (batch,) = TrainLoader(data_of(images), config, seed=0).batches(epoch)
        for i, image in zip(batch.index.tolist(), batch.images, strict=True):
            found = (possible[i] == image).flatten(1).all(1)
            assert found.sum() == 1
            counts += found
    expected = 12 * epochs / len(choices)
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)


def test_zeros_are_added_before_normalising_and_cut_out_after():
    data = data_of(torch.ones(40, 1, 8, 8), mean=0.5, std=0.25)
    (basic,) = TrainLoader(data, DataConfig(augment="basic", batch_size=40), 0).batches(0)
    assert set(basic.images.unique().tolist()) == {2.0, -2.0}
    (cut,) = TrainLoader(data, DataConfig(cutout=4, batch_size=40), 0).batches(0)
    assert set(cut.images.unique().tolist()) == {2.0, 0.0}


def test_cutout_is_a_square_about_any_pixel():
    cells = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    for side in (3, 4):
        result = augment.cut_out(torch.ones(64, 2, 8, 8), (cells + 0.5) / 8, side)
        for (y, x), image in zip(cells.tolist(), result, strict=True):
            expected = torch.ones(2, 8, 8)
            top, left = y - side // 2, x - side // 2
            expected[:, max(top, 0) : top + side, max(left, 0) : left + side] = 0
            assert torch.equal(image, expected)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (60, 100), (120, 50)])
def test_random_parts_are_those_of_torchvision(height, width):
    draws = augment.draw(augment.stream(0, 0, augment.AUGMENT), 4000, shapes=True)
    pairs = zip(draws.shapes.tolist(), draws.place.tolist(), strict=True)
    ours = torch.tensor([augment.part_box(height, width, *pair) for pair in pairs]).double()
    image = torch.zeros(1, height, width)
    torch.manual_seed(0)
    crop = RandomResizedCrop(1)
    theirs = torch.tensor([crop.get_params(image, crop.scale, crop.ratio) for _ in range(4000)])
    top, left, down, across = ours.T
    assert (down * across / (height * width)).min() > 0.07
    assert top.min() == left.min() == 0
    assert (top + down).max() == height
    assert (left + across).max() == width
    for mine, other in zip(ours.T, theirs.double().T, strict=True):
        error = math.sqrt((mine.var() + other.var()) / 4000)
        assert abs(mine.mean() - other.mean()) < 4 * error
        assert mine.std().item() == pytest.approx(other.std().item(), rel=0.06)


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10)])
def test_where_no_shape_fits_the_part_is_torchvisions_too(height, width):
    whole = [[0.99, 0.5]] * 10
    expected = RandomResizedCrop.get_params(torch.zeros(1, height, width), (1, 1), (3 / 4, 4 / 3))
    assert augment.part_box(height, width, whole, [0.5, 0.5]) == tuple(expected)


# Torchvision resizes bytes in float, torch in whole numbers: one level of 255 apart.
@pytest.mark.parametrize(("dtype", "off"), [(torch.uint8, 1.01 / 255), (torch.float32, 1e-6)])
def test_inception_resizes_the_part_and_flips_half(dtype, off):
    images = [
        torch.rand(3, 20 + i % 7, 30 - i % 5, generator=torch.Generator().manual_seed(i))
        for i in range(40)
    ]
    if dtype == torch.uint8:
        images = [(image * 255).to(dtype) for image in images]
    data = Data(Labelled(images, torch.zeros(40).long()), None, 2, 3, 16, (0.0,) * 3, (1.0,) * 3)
    (batch,) = TrainLoader(data, DataConfig(augment="inception", batch_size=40), 3).batches(1)
    draws, flips = augment.draw(augment.stream(3, 1, augment.AUGMENT), 40, shapes=True), 0
    for i, image in zip(batch.index.tolist(), batch.images, strict=True):
        box = augment.part_box(
            *images[i].shape[1:], draws.shapes[i].tolist(), draws.place[i].tolist()
        )
        part = torchvision_functional.resized_crop(images[i], *box, [16, 16], antialias=True)
        expected = part.float() / (255 if dtype == torch.uint8 else 1)
        flip = bool(draws.flip[i] < 0.5)
        expected = expected.flip(-1) if flip else expected
        torch.testing.assert_close(image, expected, atol=off, rtol=1e-5)
        flips += flip
    assert 10 < flips < 30


def test_centre_crop_is_torchvisions():
    image = torch.rand(3, 60, 40, generator=torch.Generator().manual_seed(0))
    resized = torchvision_functional.resize(image, 32, antialias=True)
    expected = torchvision_functional.center_crop(resized, 28)
    torch.testing.assert_close(augment.centred(image, 28), expected)
    assert augment.centred(image[:, :28, :28], 28).data_ptr() == image.data_ptr()
    assert augment.centred(image, 100).shape == (3, 100, 100)


def clean_and_mixed(**alphas):
    """The batches of a long epoch, without mixing and with it."""
    data = numbered(samples=1600, size=10)
    plain = TrainLoader(data, DataConfig(batch_size=4), 0).batches(0)
    mixing = TrainLoader(data, DataConfig(batch_size=4, **alphas), 0).batches(0)
    pairs = list(zip(plain, mixing, strict=True))
    mixed = [pair for pair in pairs if pair[1].mixed]
    for before, after in pairs:
        assert_same([before], [after._replace(images=before.images, mixed=None)])
        if after.mixed:
            assert sorted(after.mixed.partner.tolist()) == [0, 1, 2, 3]
        else:
            assert torch.equal(before.images, after.images)
    assert 150 < len(mixed) < 250
    return mixed


def test_mixup_is_a_weighted_mean_with_a_beta_share():
    mixed = clean_and_mixed(mixup=0.5)
    for before, after in mixed:
        partner, share, _ = after.mixed
        expected = share * before.images + (1 - share) * before.images[partner]
        torch.testing.assert_close(after.images, expected)
    shares = torch.tensor([after.mixed.share for _, after in mixed])
    assert shares.mean() == pytest.approx(0.5, abs=0.08)
    assert shares.var() == pytest.approx(1 / 8, abs=0.025)  # of Beta(a, a): 1 / (4 (2 a + 1))


def test_cutmix_pastes_a_box_and_counts_its_pixels():
    mixed = clean_and_mixed(cutmix=1.0)
    for before, after in mixed:
        partner, share, _ = after.mixed
        others = before.images[partner]
        moved = (partner != torch.arange(4)).nonzero().flatten().tolist()
        for i in moved:
            own = after.images[i, 0] == before.images[i, 0]
            assert torch.equal(after.images[i, 0], torch.where(own, before.images[i], others[i])[0])
            assert own.double().mean().item() == pytest.approx(share)
            rows, columns = (~own).any(1), (~own).any(0)
            assert torch.equal(~own, rows[:, None] & columns)  # a box, and the same in each image
            assert (rows.diff().sum(), columns.diff().sum()) <= (2, 2)
    shares = torch.tensor([after.mixed.share for _, after in mixed])
    assert 0.6 < shares.mean() < 0.7  # above a half, for what is beyond the edge is not pasted


@pytest.mark.parametrize(("size", "parts"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("kind", ["basic", "inception"])
def test_a_processs_share_is_what_it_would_see_of_the_whole(kind, size, parts):
    data = data_of(random_images(120))
    config = DataConfig(augment=kind, **{**EVERYTHING, "batch_size": 12})
    whole = list(TrainLoader(data, config, 0).batches(1, views=True))
    assert {batch.mixed is None for batch in whole} == {True, False}
    seen = []
    for rank in range(size):
        share = Share(rank, size, parts)
        rows = share.of(12)
        seen += rows.tolist()
        own = TrainLoader(data, config, 0, share).batches(1, views=True)
        for mine, batch in zip(own, whole, strict=True):
            for name in ("index", "images", "labels", "view"):
                assert torch.equal(getattr(mine, name), getattr(batch, name)[rows])
            if batch.mixed is not None:
                assert mine.mixed.share == batch.mixed.share
                assert torch.equal(mine.mixed.labels, batch.labels[batch.mixed.partner][rows])
    assert sorted(seen) == list(range(12))


def test_mixup_and_cutmix_take_turns():
    pasted = 0
    mixed = clean_and_mixed(mixup=1.0, cutmix=1.0)
    for before, after in mixed:
        whole = bool(torch.isin(after.images, before.images).all())
        pasted += whole
    assert 0.35 < pasted / len(mixed) < 0.65


@pytest.mark.parametrize("workers", [0, 2])
def test_test_images_come_in_order_and_normalised(workers):
    images = torch.arange(10, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    data = data_of(images, mean=0.5, std=0.25)
    batches = list(augment.test_batches(data, 4, workers))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([y for _, y in batches]), torch.arange(10) % 4)
    expected = ((torch.arange(10.0) / 255 - 0.5) / 0.25).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    assert torch.equal(torch.cat([x for x, _ in batches]), expected)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="batch_size 24 exceeds the 23 training samples"):
        TrainLoader(numbered(), DataConfig(batch_size=24), 0)
    with pytest.raises(ValueError, match="cutout 9 exceeds the side of an image, 8"):
        TrainLoader(numbered(), DataConfig(batch_size=2, cutout=9), 0)
    loader = TrainLoader(numbered(), DataConfig(batch_size=5), 0)
    for skip in (-1, 5):
        with pytest.raises(ValueError, match=rf"within \[0, 4\], got {skip}"):
            loader.batches(0, skip=skip)
