"""``gluon-esgd tune``: measures the collectives and writes the table that ``auto`` follows.

`command` starts jobs of `__main__`, whose ranks `measure`; `results` makes the table of it.
"""
