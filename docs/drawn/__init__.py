"""The pictures of the pages, by what they show; docs/pictures.py writes them to files.

Nouns: svg (shapes and colours), watched (what the code of shoal/parallel does, seen by an axis of no ranks).
"""
