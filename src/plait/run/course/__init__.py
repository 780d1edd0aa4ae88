"""The course: lessons that run, and a page that steps through a file with one column per rank.

lessons.py  finds the lessons, their titles and their files    start here
tracer.py   steps through a file on every rank and notes what each line changed
values.py   values as the page shows them
memory.py   bytes of the tensors that a rank has made and keeps
markers.py  comments that choose the content of the page
claims.py   labels of a lesson's numbers: verified, given, reported, derived, measured
merge.py    the records of all ranks as frames, aligned at collectives
page.py     the frames as one HTML file; viewer.js and viewer.css are in it
"""
