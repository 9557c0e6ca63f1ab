"""The default task: handwritten digits that come with scikit-learn.

1,797 pictures of 8x8 pixels. A third of them is the public part: upright, and
used to pretrain a small vision transformer. The others are mirrored, the top
row at the bottom, as if read off their reflection: the pretrained model reads
three in ten. 900 of those are the private records, 297 are the public
evaluation set. No picture is in two parts.
"""

import numpy as np
from sklearn import datasets

from . import data

PUBLIC_SIZE, PRIVATE_SIZE = 600, 900
LABELS = tuple(str(digit) for digit in range(10))


def shuffled() -> tuple[np.ndarray, np.ndarray]:
  """All pictures and their labels, in a fixed order.

  Inputs are ``(1797, 8, 8)`` float32 in [0, 1], labels ``(1797,)`` int32. The
  order is a public constant, so that runs can be compared.
  """
  images, labels = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(0).permutation(len(labels))
  images = images[order].reshape(-1, 8, 8).astype(np.float32) / 16
  return images, labels[order].astype(np.int32)


def load() -> tuple[data.Examples, data.Examples, data.Examples]:
  """Returns the parts ``(public, private, evaluation)``.

  Inputs are ``(rows, 8, 8)`` float32 in [0, 1]. The split is a public
  constant too.
  """
  images, labels = shuffled()
  cuts = [PUBLIC_SIZE, PUBLIC_SIZE + PRIVATE_SIZE]
  parts = zip(np.split(images, cuts), np.split(labels, cuts), strict=True)
  public, private, evaluation = (data.Examples(*part) for part in parts)
  return (
    public,
    private._replace(inputs=private.inputs[:, ::-1]),
    evaluation._replace(inputs=evaluation.inputs[:, ::-1]),
  )
