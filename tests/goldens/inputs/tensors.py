"""A TensorWriter of 300 rows that dies after row $GOLDEN_KILL; prints how many rows it found."""

import os
import signal
import sys

import numpy as np

import brim

STEP = 10

if __name__ == "__main__":
    os.makedirs("out", exist_ok=True)
    text = np.arange(300 * 8, dtype=np.float32).reshape(300, 8)
    spec = {"text": (8, "float32"), "number": "int64"}
    name = f"out/{sys.argv[1]}"
    options = {"shard_size": "4kB"} if sys.argv[1] == "sharded.safetensors" else {}
    with brim.TensorWriter(name, tensors=spec, resume=True, checkpoint_rows=3 * STEP, **options) as writer:
        sys.stdout.write(f"{writer.rows_done}\n")
        for at in range(writer.rows_done, 300, STEP):
            writer.append(text=text[at : at + STEP], number=np.arange(at, at + STEP))
            if at + STEP == int(os.environ.get("GOLDEN_KILL", "0")):
                os.kill(os.getpid(), signal.SIGKILL)
