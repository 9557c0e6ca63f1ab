"""How libraries shape the two factors of an adapter, for one weight."""

import style
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

INPUTS, OUTPUTS, RANK = 1.2, 0.9, 0.26
SLICE = 0.13  # How far the next module of a stack is drawn.
A, B = style.PRIVATE, style.PUBLIC
# Title, how many rows and columns each factor has, and how many modules.
CASES = (
  ('Flax, qwix, Keras', 'lora_a (in, r)', 'lora_b (r, out)', False, 1),
  ('scanned or stacked', '(layers, in, r)', '(layers, r, out)', False, 3),
  ('gemma, einsums', 'a (in, r)', 'b (r, heads, dim)', False, 1),
  ('PEFT, PyTorch', 'lora_A (r, in)', 'lora_B (out, r)', True, 1),
)


def factor(axis, x, y, rows, columns, colour, copies, parts=1):
  """A matrix whose upper left corner is (x, y), y downwards."""
  for i in reversed(range(copies)):
    axis.add_patch(
      Rectangle(
        (x + i * SLICE, y - i * SLICE), columns, rows, facecolor=colour,
        edgecolor='0.25', linewidth=0.9,
      )
    )  # fmt: skip
  for i in range(1, parts):
    at = x + i * columns / parts
    axis.plot([at, at], [y, y + rows], color='0.25', linewidth=0.9)


def main():
  figure, axes = plt.subplots(1, 4, figsize=(style.WIDTH, 2.3))
  figure.subplots_adjust(0.005, 0, 0.995, 1, 0.02)
  for axis, (title, a, b, transposed, copies) in zip(axes, CASES, strict=True):
    a_size, b_size = (INPUTS, RANK), (RANK, OUTPUTS)
    if transposed:
      a_size, b_size = a_size[::-1], b_size[::-1]
    factor(axis, 0.1, 0.75, *a_size, A, copies)
    left = 0.1 + a_size[1] + (copies - 1) * SLICE + 0.25
    factor(
      axis, left, 0.75, *b_size, B, copies, 3 if 'heads' in b else 1
    )  # fmt: skip
    axis.text(0.1, 0.1, title, weight='bold', va='center')
    axis.text(0.1, 2.2, a, va='center', color='#8A3B00')
    axis.text(0.1, 2.42, b, va='center', color='#00446B')
    axis.set(xlim=(0, 2.05), ylim=(2.6, 0), aspect='equal')
    axis.axis('off')
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
