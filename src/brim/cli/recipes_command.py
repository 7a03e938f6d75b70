"""brim recipes: list the built-in recipes and the counts that they expect."""

from dataclasses import asdict
from typing import Any

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines
from brim.options.groups import JsonOptions
from brim.options.read_options import RecipesOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class RecipesCommand(JsonOptions, RecipesOptions):
    """`brim recipes [NAME]`.

    Examples:
        brim recipes
        brim recipes arc > mine.toml

    A recipe describes how a folder becomes rows and columns, and which files and counts the complete dataset should
    have. With NAME, prints that recipe: a file to start your own from.
    """


def run(options: RecipesCommand) -> None:
    from brim.api.source_api import recipes

    listed = recipes(options.name)
    if options.json:
        for recipe in listed:
            emit("recipe", **_facts(recipe), **({} if options.name is None else {"toml": recipe.toml}))
    elif options.name is not None:
        print(listed[0].toml, end="")
    else:
        for number, recipe in enumerate(listed):
            print("\n" * bool(number), end="")
            print_lines(_lines(recipe))


def _lines(recipe: Any) -> list[tuple[str, str]]:
    expect = recipe.expect
    lines = [
        (recipe.name, recipe.title),
        ("a row", f"for each {' and '.join(recipe.key)} ({' or '.join(recipe.rows)})"),
        ("columns", ", ".join(_column(c) for c in recipe.columns)),
    ]
    for table in recipe.tables:
        lines.append((table.pattern.rpartition("/")[2], ", ".join(column.name for column in table.columns)))
    numbers = [("rows", expect.rows), (f"distinct {recipe.key[0]}", expect.subjects), *expect.counts.items()]
    numbers += [(f"files in {name}", span) for name, span in expect.files.items()]
    counts = [f"{label} {_span(span)}" for label, span in numbers if span is not None]
    if counts:
        lines.append(("expected", f"{', '.join(counts)} (tolerance {expect.tolerance:g})"))
    if expect.snapshot:
        lines.append(("snapshot", expect.snapshot))
    if expect.required:
        lines.append(("required", ", ".join(expect.required)))
    if expect.note:
        lines.append(("note", expect.note))
    return lines


def _column(column: Any) -> str:
    names = [column.name]
    if getattr(column, "split", ""):
        names = [column.split_name(value) for value in column.values] or [f"{column.name}_* (by {column.split}-)"]
    partner = getattr(column, "beside", "")
    suffix = f" (with {partner})" if partner else " (list)" if column.is_list else ""
    return ", ".join(f"{name}{suffix}" for name in names)


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]:,}" if span[0] == span[1] else f"{span[0]:,} to {span[1]:,}"


def _facts(recipe: Any) -> dict[str, Any]:
    expect = recipe.expect
    columns = [
        {("list" if name == "is_list" else name): value for name, value in asdict(c).items() if value not in ("", ())}
        for c in recipe.columns
    ]
    values = [
        {"name": c.name, "type": c.type, "table": table.pattern, "source": c.source}
        for table in recipe.tables
        for c in table.columns
    ]
    return {
        "name": recipe.name,
        "title": recipe.title,
        "root": recipe.root,
        "rows": list(recipe.rows),
        "key": list(recipe.key),
        "columns": columns,
        "values": values,
        "roots": list(recipe.roots),
        "expect": {**vars(expect), "counts": dict(expect.counts), "files": dict(expect.files)},
    }


COMMAND = Command(RecipesCommand, run)
