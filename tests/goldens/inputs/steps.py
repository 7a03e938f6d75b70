"""What the goldens compute. Its bytecode and its text are in their fingerprints: a changed line makes other jobs."""


def twice(row):
    """Two new columns, one of them with a type that shows late; a line in $GOLDEN_CALLS for every call."""
    import os
    import time

    if os.environ.get("GOLDEN_CALLS"):
        with open(os.environ["GOLDEN_CALLS"], "a") as calls:
            calls.write(f"{row['id']}\n")
        time.sleep(float(os.environ.get("GOLDEN_PAUSE_S", "0")))
    return {"twice": 2 * row["id"], "late": None if row["id"] < 100 else "text"}


def often(row):
    """As `twice`, and fails now and then."""
    if row["id"] % 50 == 7:
        raise ValueError("not this one")
    return twice(row)


def keep(row):
    """The row as it is, so that the result shows how it was read."""
    return {"read": repr(sorted(row.items()))}


def draw(row):
    """Random numbers, which are the same in every run."""
    import random

    import numpy as np

    return {"drawn": [random.random(), float(np.random.random())]}


def picky():
    """As `model`, and fails for one row."""
    encode = model()

    def encode_most(batch):
        if any(text.startswith("row 77 ") for text in batch["text"]):
            raise RuntimeError("not this text")
        return encode(batch)

    return encode_most


def model():
    """Vectors of the lengths of texts; a line in $GOLDEN_CALLS for every batch."""
    import os
    import time

    import numpy as np

    def encode(batch):
        if os.environ.get("GOLDEN_CALLS"):
            with open(os.environ["GOLDEN_CALLS"], "a") as calls:
                calls.write("".join(f"{text.split()[1]}\n" for text in batch["text"]))
            time.sleep(float(os.environ.get("GOLDEN_PAUSE_S", "0")))
        return {"text": np.array([[len(text) * k for k in range(1, 5)] for text in batch["text"]], "float32")}

    return encode
