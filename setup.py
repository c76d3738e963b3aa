"""What pyproject.toml cannot say: with LANEWAY_COMPILE=1 in the environment, a wheel holds C.

The modules of `tool.laneway.compiled` are then compiled by mypyc, and the wheel is of one platform;
whatever does not compile ends the build. Everything else, and every other install, is plain Python.
"""

import glob
import os
import sys
import tomllib

from setuptools import setup

# Python's own flags are for libraries whose functions others may replace: then none is inlined.
FLAGS = ["-fno-semantic-interposition", "-g0"]

compiling = os.environ.get("LANEWAY_COMPILE") == "1"
extensions, compilers = [], []
if compiling:
    with open("pyproject.toml", "rb") as file:
        document = tomllib.load(file)
    project = document["project"]
    # The compiler reads the types of all that is imported.
    compilers = project["dependencies"] + project["optional-dependencies"]["compile"]
    if "bdist_wheel" in sys.argv:
        from mypyc.build import mypycify

        groups = [
            ([path for pattern in patterns for path in sorted(glob.glob(pattern))], name)
            for name, patterns in document["tool"]["laneway"]["compiled"].items()
        ]
        extensions = mypycify(
            ["--follow-imports=silent", *(path for paths, _ in groups for path in paths)],
            separate=groups,
        )
        for extension in extensions:
            extension.extra_compile_args = [*extension.extra_compile_args, *FLAGS]

setup(
    setup_requires=compilers,
    ext_modules=extensions,
    options={"build_ext": {"parallel": os.cpu_count()}},
)
