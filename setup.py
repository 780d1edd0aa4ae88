"""Puts the course into the wheel: the files of lessons/ are the package plait_lessons.course there.

Everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

COURSE = [f"plait_lessons.course.{part}" for part in ("faults", "puzzles", "solutions")]

setup(
    packages=[*find_packages("src"), *find_packages("lessons"), "plait_lessons.course", *COURSE],
    package_dir={
        "": "src",
        "plait_lessons": "lessons/plait_lessons",
        "plait_lessons.course": "lessons",
        **{package: f"lessons/{package.rpartition('.')[2]}" for package in COURSE},
    },
)
