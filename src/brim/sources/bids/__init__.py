"""BIDS: neuroimaging datasets as they are, with what each image needs beside it."""
