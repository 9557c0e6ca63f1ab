"""The way of a batch through one private step, and where it becomes public."""

import style
from matplotlib import patches
from matplotlib import pyplot as plt

PRIVATE = (
  ('records', 'drawn by chance,\nnobody sees which'),
  ('gradients', 'one for each record,\nby one model'),
  ('clip', 'each at most $C$ long,\nin the tangent space'),
  ('sum', 'integers, over\na public constant'),
  ('noise', 'Gaussian, added\nto every entry'),
)
PUBLIC = (
  ('precondition', 'moments of what\nwas released'),
  ('retract', 'the nearest matrix\nof rank $r$'),
  ('parameters', 'after every step,\nepsilon stated'),
)
WIDTH, HEIGHT, GAP = 1.56, 1.0, 0.26


def box(axis, x, title, text, colour):
  axis.add_patch(
    patches.FancyBboxPatch(
      (x, 0), WIDTH, HEIGHT, boxstyle='round,pad=0.02,rounding_size=0.08',
      facecolor=colour, edgecolor='0.35', linewidth=0.8,
    )
  )  # fmt: skip
  axis.text(
    x + WIDTH / 2, 0.74, title, ha='center', va='center', weight='bold',
    fontsize=10,
  )  # fmt: skip
  axis.text(x + WIDTH / 2, 0.32, text, ha='center', va='center', fontsize=7.5)


def main():
  figure, axis = plt.subplots(figsize=(10.5, 1.9), layout='constrained')
  steps = [
    *((*x, '#F6D5D0') for x in PRIVATE),
    *((*x, '#D5E5F3') for x in PUBLIC),
  ]
  for i, (title, text, colour) in enumerate(steps):
    x = i * (WIDTH + GAP)
    box(axis, x, title, text, colour)
    if i:
      axis.annotate(
        '', (x - 0.03, 0.5), (x - GAP + 0.03, 0.5),
        arrowprops={'arrowstyle': '->', 'color': '0.35'},
      )  # fmt: skip
  border = len(PRIVATE) * (WIDTH + GAP) - GAP / 2
  axis.plot([border] * 2, [-0.25, 1.45], color='0.15', linewidth=1.6)
  axis.text(
    border - 0.1, 1.32, 'private: nothing leaves', ha='right', va='center'
  )
  axis.text(border + 0.1, 1.32, 'public: anything may be computed', va='center')
  axis.set(
    xlim=(-0.1, len(steps) * (WIDTH + GAP) - GAP + 0.1), ylim=(-0.3, 1.5)
  )
  axis.axis('off')
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
