"""brim with object stores of several makers: SeaweedFS, moto, s3rver, rclone, Azurite, and gs:// by a test server.

The suite runs SeaweedFS and gs://, and `make test-stores` installs the others. The environment variable
BRIM_STORES_TABLE names a file for the table of docs/how-to/buckets.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from brim.storage.lease import Lease
from brim.storage.location import parse_location
from tests.conftest import brim, random_bytes, tree_digest, write_files
from tests.destinations import FolderDestination, Listing, listing, run, start
from tests.stores.servers import ALL, BUCKET, RunningStore

SHARDS = ("--shard-size", "9MB")  # two parts per shard
IN_SUITE = ("seaweedfs", "google")
COLUMNS = ("build", "map", "resume after kill", "two runs", "verify", "deep", "unpack", "odd keys", "`datasets`")
_CELLS: dict[str, dict[str, str]] = {}


@dataclass
class StoreDestination:
    store: RunningStore
    folder: Path
    prefix: str

    @property
    def address(self) -> str:
        return f"{self.store.scheme}://{BUCKET}/{self.prefix}"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.store.environment, "XDG_STATE_HOME": str(self.folder / "state")}

    def content(self) -> dict[str, bytes]:
        store, obstore = self._client()
        actual = [item["path"] for page in obstore.list(store, f"{self.prefix}/") for item in page]
        names = [path[len(self.prefix) + 1 :] for path in actual]
        return {n: bytes(obstore.get(store, f"{self.prefix}/{n}").bytes()) for n in names if not n.startswith(".brim/")}

    def plant(self, name: str, data: bytes) -> None:
        store, obstore = self._client()
        obstore.put(store, f"{self.prefix}/{name}", data, use_multipart=False)

    def _client(self) -> tuple[object, object]:
        import obstore

        from brim.storage.location import parse_location
        from brim.storage.objects import store_of

        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.store.environment.items():
                patch.setenv(name, value)
            return store_of(parse_location(self.address)), obstore


def stores() -> list[str]:
    return list(ALL) if os.environ.get("BRIM_STORES") else list(IN_SUITE)


@pytest.fixture(scope="module", params=stores())
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    with ALL[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def destination(store: RunningStore, tmp_path: Path) -> StoreDestination:
    return StoreDestination(store, tmp_path / "machine", f"t{secrets.token_hex(4)}/with a blank")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files for four shards of two files each, with names that keys must escape."""
    names = ["a b.bin", "ü+%25.bin", "c#?=&.bin", "d'.bin", *(f"{n}.bin" for n in range(4))]
    return write_files(tmp_path_factory.mktemp("source"), {n: random_bytes(4_400_000, i) for i, n in enumerate(names)})


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Listing:
    existing = FolderDestination(tmp_path_factory.mktemp("expected") / "out")
    run(existing, "build", source, existing.address, "--quiet", *SHARDS)
    return listing(existing)


@pytest.fixture
def cells(store: RunningStore) -> dict[str, str]:
    """Return a row of the table. Cells stay "no" until a test writes them."""
    return _CELLS.setdefault(store.name, dict.fromkeys(COLUMNS, "no"))


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Write the table of docs/how-to/buckets.md if BRIM_STORES_TABLE is set."""
    yield
    if path := os.environ.get("BRIM_STORES_TABLE"):
        lines = [f"| store | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in _CELLS.items()]
        Path(path).write_text("\n".join(lines) + "\n")


class TestEveryStore:
    """The operations that brim guarantees for every object store."""

    def test_built_verified_unpacked(
        self, destination: StoreDestination, source: Path, expected: Listing, cells: dict[str, str], tmp_path: Path
    ) -> None:
        """A build has the bytes of a local one, is recognized by the next run, verifies and unpacks."""
        run(destination, "build", source, destination.address, "--quiet", *SHARDS)
        assert listing(destination) == expected
        cells["build"] = "yes"
        reread = json.loads(
            run(destination, "build", source, destination.address, "--json", *SHARDS).stdout.splitlines()[-1]
        )
        assert (reread["written"], reread["kept"]) == (0, 4)
        run(destination, "verify", destination.address, "--quiet")
        result = run(destination, "verify", destination.address, source, "--deep", "--json")
        assert json.loads(result.stdout.splitlines()[-1])["files_compared"] == 8
        cells["deep"] = "yes"
        run(destination, "unpack", destination.address, tmp_path / "back", "--quiet")
        assert tree_digest(tmp_path / "back") == tree_digest(source)
        cells["unpack"] = "yes"

    def test_mapped(self, destination: StoreDestination, cells: dict[str, str], tmp_path: Path) -> None:
        """Mapping objects of the store into the store gives the shards of a local run."""
        rows = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(500))
        destination.plant("rows/a.jsonl", rows.encode())
        write_files(tmp_path / "rows", {"a.jsonl": rows.encode()})
        write_files(tmp_path, {"steps.py": b"def longer(row):\n    return {'length': len(row['text'])}\n"})
        function = ("--fn", f"{tmp_path / 'steps.py'}:longer", "--quiet", "--memory", "600MB")
        local = FolderDestination(tmp_path / "out")
        run(local, "map", tmp_path / "rows" / "a.jsonl", local.address, *function)
        existing = StoreDestination(destination.store, destination.folder, f"{destination.prefix}/mapped")
        run(existing, "map", f"{destination.address}/rows/a.jsonl", existing.address, *function)
        assert listing(existing) == listing(local)
        cells["map"] = "yes"

    def test_killed_and_continued(
        self, destination: StoreDestination, source: Path, expected: Listing, cells: dict[str, str]
    ) -> None:
        for pause_s in (0.8, 1.1):
            process = start(destination, "build", source, destination.address, "--quiet", *SHARDS)
            time.sleep(pause_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
        run(destination, "build", source, destination.address, "--quiet", *SHARDS)
        assert listing(destination) == expected
        run(destination, "verify", destination.address, source, "--quiet")
        cells["resume after kill"] = "yes"

    def test_two_at_once(self, destination: StoreDestination, source: Path, cells: dict[str, str]) -> None:
        """A concurrent run is refused, and a warning is printed for stores that ignore conditions of writes."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in destination.store.environment.items():
                patch.setenv(name, value)
            lease = Lease(parse_location(destination.address), "somebody else", lambda text: None)
            lease.take(lambda: None)
            try:
                completed = run(destination, "build", source, destination.address, *SHARDS, check=2)
            finally:
                lease.release()
        assert "Another brim is building at this destination" in completed.stderr
        completed = run(destination, "build", source, destination.address, *SHARDS)
        assert ("heeds no conditions" in completed.stderr) != destination.store.guarded
        assert not any(name.startswith((".brim/check-", ".brim/lock")) for name in self.keys(destination))
        cells["two runs"] = (
            "separated" if destination.store.guarded else "separated, unless they start at the same moment"
        )

    def test_damage_is_found(self, destination: StoreDestination, source: Path, cells: dict[str, str]) -> None:
        """Damage is found by the ETag. Stores whose ETags do not identify content need --deep, which is printed."""
        run(destination, "build", source, destination.address, "--quiet", *SHARDS)
        name, data = next((n, d) for n, d in destination.content().items() if n.startswith("data/"))
        destination.plant(name, data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
        if not destination.store.telling:
            assert (
                "this store's ETags do not identify content" in run(destination, "verify", destination.address).stdout
            )
        deep = () if destination.store.telling else ("--deep",)
        assert name in run(destination, "verify", destination.address, *deep, check=3).stderr
        cells["verify"] = "yes, finds damage" if destination.store.telling else "sizes; `--deep` finds damage"

    def test_objects_as_source(
        self, destination: StoreDestination, source: Path, expected: Listing, cells: dict[str, str], tmp_path: Path
    ) -> None:
        """Unusual keys are read like local files, and a replaced object is detected."""
        for path in source.iterdir():
            destination.plant(f"in/{path.name}", path.read_bytes())
        local = FolderDestination(tmp_path / "out")
        outcome = run(destination, "build", f"{destination.address}/in", local.address, "--json", *SHARDS)
        assert listing(local) == expected
        assert json.loads(outcome.stdout.splitlines()[-1])["written"] == 4
        cells["odd keys"] = "yes"

    def test_loaded_as_printed(
        self, destination: StoreDestination, source: Path, cells: dict[str, str], tmp_path: Path
    ) -> None:
        """The code that a build prints for loading runs unchanged once its packages are installed."""
        reader = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}[destination.store.scheme]
        if importlib.util.find_spec(reader) is None:
            cells["`datasets`"] = "not run"
            pytest.skip(f"{reader} is not installed: make test-stores")
        # The printed code contains the endpoint only if it was set by an option.
        known_values = {
            n: v for n, v in destination.store.environment.items() if n in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST")
        }
        for name, endpoint in [("", ""), *known_values.items()]:
            environment = {n: v for n, v in destination.environment.items() if n != name}
            present = StoreDestination(destination.store, destination.folder, f"{destination.prefix}/{bool(name)}")
            message = ("--endpoint-url", endpoint) if name else ()
            finished = brim("build", source, present.address, *message, *SHARDS, env=environment)
            line = next(
                item.split(maxsplit=1)[1] for item in finished.stdout.splitlines() if item.strip().startswith("load ")
            )
            assert line.endswith(f"# pip install {reader}")
            program = f"import datasets\nfound = {line}\nprint(sorted(row['file']['path'] for row in found['train']))"
            read = subprocess.run(
                [sys.executable, "-c", program],
                env=environment | {"HF_HOME": str(tmp_path / f"hf{name}"), "HF_HUB_OFFLINE": "0"},
                capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            assert read.returncode == 0, read.stderr
            assert read.stdout.strip() == str(sorted(path.name for path in source.iterdir()))
        cells["`datasets`"] = "yes"

    @staticmethod
    def keys(destination: StoreDestination) -> list[str]:
        store, obstore = destination._client()
        return [
            entry["path"][len(destination.prefix) + 1 :]
            for page in obstore.list(store, destination.prefix)  # type: ignore[attr-defined]
            for entry in page
        ]
