"""Shards and units done by the tasks of a running Ray, which places them. What is tried again is brim's to decide."""
