"""Images and labels, a file in the IDX format, and a data module that has read its files."""

import struct

import numpy as np

RNG = np.random.default_rng(0)
TRAIN = RNG.integers(0, 256, (60, 28, 28), dtype=np.uint8)
TEST = RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def ready(data):
    data.prepare_data()
    data.setup()
    return data
