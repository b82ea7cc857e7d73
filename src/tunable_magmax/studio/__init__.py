"""The studio: a page on this machine on which a person finds a preference by hand and eye, and leaves with a model.

docs/studio-protocol.md is the contract between the server in this package and the page in `static/`.
"""
