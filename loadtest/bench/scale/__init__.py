"""`scripts/bench scale`: what many workers, many streams and large bodies cost.

Each part is a module with a function that takes a `Size` and yields `Figure`s; `parts.PARTS` lists
them, and to add a part is to add a line there. Where nginx can do the same it runs beside, in the
same run. CPU is that of the whole process tree, so a busy machine blurs it less than it does time.
"""
