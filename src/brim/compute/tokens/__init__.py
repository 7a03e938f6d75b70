"""Tokenising: texts to token ids, and token ids to packed, split and shuffled shards."""
