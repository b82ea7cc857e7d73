"""The studio: a page on this machine on which a person finds a preference by hand and eye, and leaves with a model.

`server.py` lists the requests that the page in `static/` makes.
"""
