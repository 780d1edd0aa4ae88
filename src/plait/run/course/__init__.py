"""The course: lessons that run.

lessons.py  finds the lessons, their titles and their files    start here
"""
