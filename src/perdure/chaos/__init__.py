"""Faults on purpose: what they are (`faults`), when and whom they hit (`campaign`), how they are carried out
(`injector`), and whether the job stood them (`verdict`). The four know nothing of one another's insides.
"""
