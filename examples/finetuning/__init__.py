"""The parts of ``finetune.py``: one idea a file."""
