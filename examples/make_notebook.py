"""Make data_parallel_tutorial.ipynb from data_parallel_tutorial.py.

The script is the source: `# %%` opens a code cell, `# %% [markdown]` a text cell.

    python examples/make_notebook.py
"""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SCRIPT = Path(__file__).with_name("data_parallel_tutorial.py")
NOTEBOOK = SCRIPT.with_suffix(".ipynb")


def make_notebook(script):
    """The notebook of a script, without outputs and with ids that do not change from run to run."""
    cells = []
    for number, block in enumerate(script.split("# %%")[1:]):
        heading, _, body = block.partition("\n")
        if heading.strip() == "[markdown]":
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
            cell = new_markdown_cell(text.strip())
        else:
            cell = new_code_cell(body.strip())
        cell["id"] = f"cell-{number}"
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


if __name__ == "__main__":
    nbformat.write(make_notebook(SCRIPT.read_text()), NOTEBOOK)
    print("wrote", NOTEBOOK.name)
