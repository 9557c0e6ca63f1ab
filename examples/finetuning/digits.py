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


def load() -> tuple[data.Examples, data.Examples, data.Examples]:
  """Returns the parts ``(public, private, evaluation)``.

  Inputs are ``(rows, 8, 8)`` float32 in [0, 1]. The split is fixed: a public
  constant, so that runs can be compared.
  """
  images, labels = datasets.load_digits(return_X_y=True)
  images = images.reshape(-1, 8, 8).astype(np.float32) / 16
  labels = labels.astype(np.int32)
  order = np.random.default_rng(0).permutation(len(labels))
  public, private, evaluation = np.split(
    order, [PUBLIC_SIZE, PUBLIC_SIZE + PRIVATE_SIZE]
  )
  return (
    data.Examples(images[public], labels[public]),
    data.Examples(images[private][:, ::-1], labels[private]),
    data.Examples(images[evaluation][:, ::-1], labels[evaluation]),
  )
