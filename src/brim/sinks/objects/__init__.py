"""A place in a bucket as destination."""
