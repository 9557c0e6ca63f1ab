"""Proofs about programs, read from their jaxprs when a training is built.

No value is looked at: what is proved holds for every record.
"""
