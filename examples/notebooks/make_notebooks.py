"""Run the notebooks of this folder and write them back with what they show: `python make_notebooks.py [--check]`.

Each runs in an empty folder, with caches of its own and without a network. With --check nothing is written; a cell that
fails ends it. Needs `pip install nbclient ipykernel '.[compute,datasets]' pillow tokenizers`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of this run, without what differs from run to run."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        os.environ |= {"BRIM_CACHE": f"{folder}/cache", "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
        os.environ |= {"XDG_STATE_HOME": f"{folder}/state", "BRIM_MEMORY": "1GB"}
        work = Path(folder) / "work"
        work.mkdir()
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(work)}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.get("metadata", {}).pop("execution", None)
        # The bar is gone when a cell has ended for whoever reads it; warnings of the machine are not ours.
        if "outputs" in cell:
            cell["outputs"] = [out for out in cell["outputs"] if out["output_type"] in ("execute_result", "stream")]
            cell["outputs"] = [out for out in cell["outputs"] if out.get("name") != "stderr" and _text(out).strip()]
    notebook = nbformat.reads(nbformat.writes(notebook).replace(f"{work}/", ""), as_version=4)
    notebook["metadata"] = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def _text(output: nbformat.NotebookNode) -> str:
    return str(output.get("text") or output["data"].get("text/plain", ""))


def main() -> None:
    for path in sorted(HERE.glob("*.ipynb")):
        done = run(path)
        if "--check" not in sys.argv:
            nbformat.write(done, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in done.cells)} cells")


if __name__ == "__main__":
    main()
