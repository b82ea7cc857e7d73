"""Inputs are decoded in order, only those asked for, and files are read no more often than they must be."""

import io

import numpy as np
import pytest
from PIL import Image

from tunable_magmax.data import images
from tunable_magmax.data.images import map_in_threads, read_picture
from tunable_magmax.data.source import as_samples


def encoded(image, kind="png", **more):
    file = io.BytesIO()
    image.save(file, format=kind, **more)
    return file.getvalue()


def test_threads_keep_the_order_and_stay_near_the_reader():
    taken = []
    results = map_in_threads(lambda k: taken.append(k) or k * k, range(100), 3)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(taken) <= 5 + 3 * images.IMAGES_AHEAD
    results.close()
    assert list(map_in_threads(lambda k: k * k, range(50), 3)) == [k * k for k in range(50)]
    with pytest.raises(ZeroDivisionError):
        list(map_in_threads(lambda k: 1 // k, [1, 0, 1], 2))


def test_pictures_are_turned_as_the_camera_says():
    image = Image.new("RGB", (4, 2), (0, 0, 0))
    image.putpixel((0, 0), (255, 255, 255))
    told = Image.Exif()
    told[0x0112] = 6
    for kind, more in (("png", {}), ("webp", {"lossless": True})):
        found = read_picture(encoded(image, kind, exif=told, **more), "x")
        assert found.size == (2, 4)
        assert found.getpixel((1, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_sixteen_bits_a_channel_are_not_white(tmp_path, kind):
    Image.fromarray(np.array([[0, 0x4000], [0x8000, 0xFFFF]], np.uint16)).save(tmp_path / f"x.{kind}")
    with Image.open(tmp_path / f"x.{kind}") as in_memory:
        for picture in (read_picture(tmp_path / f"x.{kind}", "x"), *as_samples([in_memory], "inputs").load([0])):
            assert np.asarray(picture)[..., 0].tolist() == [[0, 64], [128, 255]]
