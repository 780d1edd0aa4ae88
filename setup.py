"""Puts the course into the wheel: the files of lessons/ are the package plait_lessons.course there.

Everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("src"), *find_packages("lessons"), "plait_lessons.course", "plait_lessons.course.faults"],
    package_dir={
        "": "src",
        "plait_lessons": "lessons/plait_lessons",
        "plait_lessons.course": "lessons",
        "plait_lessons.course.faults": "lessons/faults",
    },
)
