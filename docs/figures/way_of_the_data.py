"""The way of a batch through one private step, and where it becomes public."""

import style
from matplotlib import patches
from matplotlib import pyplot as plt

PRIVATE = (
  ('records', 'drawn at random,\nin secret'),
  ('gradients', 'one for each\nrecord'),
  ('clip', 'each of norm\nat most $C$'),
  ('sum', 'integers, over a\npublic constant'),
  ('noise', 'Gaussian, added\nto every entry'),
)
PUBLIC = (
  ('precondition', 'moments of past\nreleases'),
  ('retract', 'to a matrix of\nrank $r$'),
  ('parameters', 'after every step,\nwith an epsilon'),
)
WIDTH, HEIGHT, GAP = 1.27, 0.8, 0.16


def box(axis, x, y, title, text, colour):
  axis.add_patch(
    patches.FancyBboxPatch(
      (x, y), WIDTH, HEIGHT, boxstyle='round,pad=0,rounding_size=0.08',
      facecolor=colour, edgecolor='0.35', linewidth=0.8,
    )
  )  # fmt: skip
  axis.text(
    x + WIDTH / 2, y + 0.62, title, ha='center', va='center', weight='bold'
  )
  axis.text(
    x + WIDTH / 2, y + 0.26, text, ha='center', va='center', fontsize=8.5
  )


def arrow(axis, start, end):
  axis.annotate(
    '', end, start,
    arrowprops={'arrowstyle': '->', 'color': '0.2', 'shrinkA': 0, 'shrinkB': 0},
  )  # fmt: skip


def main():
  figure, axis = plt.subplots(figsize=(style.WIDTH, 2.35))
  figure.subplots_adjust(0, 0, 1, 1)
  upper, lower = 1.3, 0.05
  for i, (title, text) in enumerate(PRIVATE):
    x = i * (WIDTH + GAP)
    box(axis, x, upper, title, text, style.PRIVATE)
    if i:
      arrow(axis, (x - GAP, upper + 0.4), (x, upper + 0.4))
  end = len(PRIVATE) * (WIDTH + GAP) - GAP
  for i, (title, text) in enumerate(PUBLIC):
    x = end - WIDTH - i * (WIDTH + GAP)
    box(axis, x, lower, title, text, style.PUBLIC)
    if i:
      right = x + WIDTH
      arrow(axis, (right + GAP, lower + 0.4), (right, lower + 0.4))
  arrow(axis, (end - WIDTH / 2, upper), (end - WIDTH / 2, lower + HEIGHT))
  border = (upper + lower + HEIGHT) / 2
  axis.plot([0, end], [border] * 2, color='k', linewidth=1.6)
  axis.text(0, border + 0.06, 'private: nothing leaves', va='bottom')
  axis.text(0, border - 0.08, 'public: may be published', va='top')
  axis.set(xlim=(-0.02, end + 0.02), ylim=(0, 2.15))
  axis.axis('off')
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
