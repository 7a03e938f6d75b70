"""The Hugging Face Hub as destination: shards sent as they are made, published in one step, and proved."""
