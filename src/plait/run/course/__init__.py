"""The course: lessons that run, and a page that steps through a file with one column per rank.

lessons.py  finds the lessons, their titles and their files    start here
tracer.py   steps through a file on every rank and notes what each line changed
page.py     a trace as one HTML file; viewer.js and viewer.css are in it
"""
