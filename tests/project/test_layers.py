"""The imports between packages follow the layers in docs/contributing/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import brim

SOURCE = Path(brim.__file__).parent
# A package may import those to its right and none to its left.
ORDER = [
    "__main__",
    "cli",
    "lab",
    "brim",
    "api",
    "loader",
    "jobs",
    "verification",
    "execution",
    "compute",
    "tensors",
    "plans",
    "sources",
    "stores",
    "formats",
    "monitor",
    "partition",
    "block_pandas",
    "file_set",
    "options",
    "progress",
    "storage",
    "state",
    "memory",
    "redact",
    "sizes",
    "safe_names",
    "extras",
    "errors",
    "wording",
    "records",
]
MOST_LINES = 650


def room_of(module: str) -> str:
    """Return the package or root module that contains a dotted name; the root itself is `brim`."""
    first = module.split(".")[1] if "." in module else ""
    return first if first in ORDER else "brim"


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} if node.module != "brim" else {f"brim.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "brim"}


def modules() -> dict[str, Path]:
    actual = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        actual[".".join(["brim", *parts]).removesuffix(".__init__")] = path
    return actual


def test_one_dataclass() -> None:
    """All modules use the dataclass of brim.records, which loads in a tenth of the standard one's time."""
    actual = [
        f"{module}: from brim.records import dataclass"
        for module, path in modules().items()
        if module != "brim.records"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        if "dataclass" in {alias.name for alias in node.names}
    ]
    assert not actual


def test_imports_go_one_way() -> None:
    """Every import leads to a lower layer; any module may import the version from `brim`."""
    wrong = []
    for module, path in modules().items():
        budget = room_of(module)
        for name in imports_of(path):
            to = room_of(name)
            if to != budget and ORDER.index(to) < ORDER.index(budget) and name not in ("brim", "brim.__version__"):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_monitor_depends_only_on_memory_state_and_root_modules() -> None:
    """The monitor imports only memory, state and root modules, so it could be a separate package."""
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"monitor", "memory", "state"}
    wrong = [
        f"{module} imports {name}"
        for module, path in modules().items()
        if module.startswith("brim.monitor.")
        for name in imports_of(path)
        if room_of(name) in packages
    ]
    assert not wrong


def test_a_name_is_found_once() -> None:
    """File names and public class names are unique, so that a search finds the right one."""
    files = [path.name for path in modules().values() if not path.name.startswith("__")]
    assert not {name for name in files if files.count(name) > 1}
    classes = [
        node.name
        for path in modules().values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in classes if classes.count(name) > 1}


# Attributes for the kind of a location, and the modules that use them because a feature exists for that kind only.
KINDS = {"is_local", "is_bucket", "is_hub_bucket", "is_repository", "is_object_address", "is_dataset_address"}
ASKING = {
    "api.compute_api": "--image reads a folder of pictures, local or in a bucket",
    "cli.print_output": "the printed command repeats --endpoint-url for buckets",
    "compute.rows.row_files": "a local folder is read by its tree; a repository may hold a dataset of Parquet files",
    "compute.steps.embed_step": "pictures that rows name by their address in a bucket",
    "jobs": "destinations: folders are locked, buckets leased, repositories committed to",
    "plans": "whether a destination is inside its source",
    "sources.open_source": "a repository is a dataset",
    "sources.table_source": "a table may name files by their addresses in a bucket",
    "verification": "local shards are read and repaired, those of a repository have a listed SHA-256",
}
REPLACED = {"is_bucket_address", "is_web_address", "on_hub", "WEB_SCHEMES", "HubAddress", "BucketAddress"}
LOCATION_TYPES = {"Location", "Access", "Storage", "LocalStorage", "ObjectStorage", "HubRepository", "HubBucketStorage"}


def names_in(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_storage_alone_distinguishes_locations() -> None:
    """Only the storage package tests the type of a location; other modules ask for its kind only for a special
    feature."""
    wrong, asking = [], set()
    for module, path in modules().items():
        if room_of(module) in ("storage", "monitor"):  # a package that imports no storage
            continue
        tree = ast.parse(path.read_text())
        names = names_in(tree)
        wrong += [f"{module}: {name}" for name in names & REPLACED]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                wrong += [f"{module}: isinstance {name}" for name in names_in(node.args[1]) & LOCATION_TYPES]
        if names & KINDS:
            dotted = module.removeprefix("brim.")
            asking.add(dotted if dotted in ASKING else dotted.split(".")[0])
    assert not wrong
    assert asking == ASKING.keys()


def test_the_runner_asks_no_destination_for_its_type() -> None:
    """Differences between folders, repositories and caches are in the methods and paths of their destinations."""
    kinds = {"Destination", "FilesDestination", "HubDestination", "CacheDestination", "DestinationPaths"}
    requested = [
        f"{module}: isinstance {name}"
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        for name in names_in(node.args[1]) & kinds
    ]
    assert not requested


def test_backends_import_the_network_libraries() -> None:
    """Only these storage modules import network libraries, so that a process with local files loads none."""
    actual = {
        module
        for module, path in modules().items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in ("asyncio", "httpx", "httpx2", "obstore", "huggingface_hub")
    }
    assert actual == {f"brim.storage.{name}" for name in ("event_loop", "hub_api", "objects")}


def test_no_room_hides_a_function() -> None:
    """No package or root module has the name of a public function, which it would replace once imported."""
    assert not {room_of(module) for module in modules()} & {name for name in brim.__all__ if not name.startswith("_")}


def test_packages_are_empty() -> None:
    """Package __init__ files except those of brim and cli are empty, because every worker would run their imports."""
    full = [
        p for p in SOURCE.rglob("__init__.py") if p.parent not in (SOURCE, SOURCE / "cli") and p.read_text().strip()
    ]
    assert not full


def test_modules_stay_small() -> None:
    """No module has more than MOST_LINES lines."""
    assert not [f"{p.name}: {n}" for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > MOST_LINES]


def test_importing_brim_is_light() -> None:
    """`import brim`, its functions and a plan import no optional library and no pandas."""
    code = (
        "import sys, brim; brim.plan, brim.table, brim.verify, brim.TensorWriter; "
        "optional = ('datasets', 'pandas', 'torch', 'safetensors', 'polars', 'huggingface_hub'); "
        "print([m for m in optional if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names() -> None:
    """The public interface is exactly this list."""
    assert brim.__all__ == [
        "ArgumentError",
        "BrimError",
        "BuildPlan",
        "BuildResult",
        "CacheEntry",
        "Check",
        "CheckReport",
        "ColumnInfo",
        "CommandStartError",
        "DatasetInfo",
        "DestinationError",
        "DestinationUnavailableError",
        "FileTable",
        "Forecast",
        "InputError",
        "InvalidFilesError",
        "Loader",
        "MapResult",
        "MemoryLimitError",
        "MissingDependencyError",
        "PartResult",
        "PlanMismatchError",
        "PlanStatus",
        "Progress",
        "Recipe",
        "SavedBuild",
        "SavedComputation",
        "Selection",
        "ShardedTensor",
        "SourceChangedError",
        "SourceError",
        "SplitInfo",
        "Stop",
        "StoppedError",
        "TensorWriter",
        "UnitStats",
        "UnpackResult",
        "UserFunctionError",
        "Vectors",
        "VerificationError",
        "VerifyResult",
        "WhyReport",
        "__version__",
        "bids",
        "build",
        "caches",
        "check",
        "clean",
        "concatenate_datasets",
        "dataset",
        "embed",
        "files",
        "filter",
        "flatten_indices",
        "forecast",
        "info",
        "map",
        "open_job",
        "open_plan",
        "open_tensors",
        "plan",
        "push_to_hub",
        "recipes",
        "release",
        "save_file",
        "save_job",
        "select",
        "shuffle",
        "sort",
        "table",
        "tokenize",
        "train_test_split",
        "unpack",
        "verify",
        "watch",
        "why",
    ]
    assert all(getattr(brim, name) is not None for name in brim.__all__)
    assert dir(brim) == brim.__all__
