"""The command ``prism-optax``: a program; its parts are no public names."""

__all__: list[str] = []
