"""What every object store is for brim, whoever makes it: SeaweedFS, moto, s3rver, rclone, Azurite, and gs:// by our
own server.

The suite runs SeaweedFS and gs://; `make test-stores` installs the others. BRIM_STORES_TABLE names a file into which
the table of docs/how-to/buckets.md is written.
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
from tests.places import FolderPlace, Listing, listing, run, start
from tests.stores.servers import ALL, BUCKET, RunningStore

SHARDS = ("--shard-size", "9MB")  # two parts a shard
IN_SUITE = ("seaweedfs", "google")
COLUMNS = ("build", "map", "resume after kill", "two runs", "verify", "deep", "unpack", "odd keys", "`datasets`")
_CELLS: dict[str, dict[str, str]] = {}


@dataclass
class StorePlace:
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
        found = [one["path"] for page in obstore.list(store, f"{self.prefix}/") for one in page]
        names = [path[len(self.prefix) + 1 :] for path in found]
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
def place(store: RunningStore, tmp_path: Path) -> StorePlace:
    return StorePlace(store, tmp_path / "machine", f"t{secrets.token_hex(4)}/with a blank")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of two files each, names that keys need escapes for among them."""
    names = ["a b.bin", "ü+%25.bin", "c#?=&.bin", "d'.bin", *(f"{n}.bin" for n in range(4))]
    return write_files(tmp_path_factory.mktemp("source"), {n: random_bytes(4_400_000, i) for i, n in enumerate(names)})


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Listing:
    there = FolderPlace(tmp_path_factory.mktemp("expected") / "out")
    run(there, "build", source, there.address, "--quiet", *SHARDS)
    return listing(there)


@pytest.fixture
def cells(store: RunningStore) -> dict[str, str]:
    """A row of the table. What a test has not come to write there stays "no"."""
    return _CELLS.setdefault(store.name, dict.fromkeys(COLUMNS, "no"))


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """The table of docs/how-to/buckets.md, for whoever asks for it."""
    yield
    if path := os.environ.get("BRIM_STORES_TABLE"):
        lines = [f"| store | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in _CELLS.items()]
        Path(path).write_text("\n".join(lines) + "\n")


class TestEveryStore:
    """The contract of object stores."""

    def test_built_verified_unpacked(
        self, place: StorePlace, source: Path, expected: Listing, cells: dict[str, str], tmp_path: Path
    ) -> None:
        """Built with the bytes of a folder, known again, verified by what it lists and by content, and taken back."""
        run(place, "build", source, place.address, "--quiet", *SHARDS)
        assert listing(place) == expected
        cells["build"] = "yes"
        again = json.loads(run(place, "build", source, place.address, "--json", *SHARDS).stdout.splitlines()[-1])
        assert (again["written"], again["kept"]) == (0, 4)
        run(place, "verify", place.address, "--quiet")
        done = run(place, "verify", place.address, source, "--deep", "--json")
        assert json.loads(done.stdout.splitlines()[-1])["files_compared"] == 8
        cells["deep"] = "yes"
        run(place, "unpack", place.address, tmp_path / "back", "--quiet")
        assert tree_digest(tmp_path / "back") == tree_digest(source)
        cells["unpack"] = "yes"

    def test_mapped(self, place: StorePlace, cells: dict[str, str], tmp_path: Path) -> None:
        """Rows from objects of the store, through a function, to shards in it: those of a local run."""
        rows = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(500))
        place.plant("rows/a.jsonl", rows.encode())
        write_files(tmp_path / "rows", {"a.jsonl": rows.encode()})
        write_files(tmp_path, {"steps.py": b"def longer(row):\n    return {'length': len(row['text'])}\n"})
        function = ("--fn", f"{tmp_path / 'steps.py'}:longer", "--quiet", "--memory", "600MB")
        here = FolderPlace(tmp_path / "out")
        run(here, "map", tmp_path / "rows" / "a.jsonl", here.address, *function)
        there = StorePlace(place.store, place.folder, f"{place.prefix}/mapped")
        run(there, "map", f"{place.address}/rows/a.jsonl", there.address, *function)
        assert listing(there) == listing(here)
        cells["map"] = "yes"

    def test_killed_and_continued(
        self, place: StorePlace, source: Path, expected: Listing, cells: dict[str, str]
    ) -> None:
        for pause_s in (0.8, 1.1):
            process = start(place, "build", source, place.address, "--quiet", *SHARDS)
            time.sleep(pause_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
        run(place, "build", source, place.address, "--quiet", *SHARDS)
        assert listing(place) == expected
        run(place, "verify", place.address, source, "--quiet")
        cells["resume after kill"] = "yes"

    def test_two_at_once(self, place: StorePlace, source: Path, cells: dict[str, str]) -> None:
        """Somebody who is at work there is seen; of a store that heeds no conditions it is said what that leaves."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in place.store.environment.items():
                patch.setenv(name, value)
            lease = Lease(parse_location(place.address), "somebody else", lambda text: None)
            lease.take(lambda: None)
            try:
                done = run(place, "build", source, place.address, *SHARDS, check=2)
            finally:
                lease.release()
        assert "Another brim is building at this destination" in done.stderr
        done = run(place, "build", source, place.address, *SHARDS)
        assert ("heeds no conditions" in done.stderr) != place.store.guarded
        assert not any(name.startswith((".brim/check-", ".brim/lock")) for name in self.keys(place))
        cells["two runs"] = "separated" if place.store.guarded else "separated, unless they start at the same moment"

    def test_damage_is_found(self, place: StorePlace, source: Path, cells: dict[str, str]) -> None:
        """By the ETag of an object; where that tells nothing, this is said, and its content is read."""
        run(place, "build", source, place.address, "--quiet", *SHARDS)
        name, data = next((n, d) for n, d in place.content().items() if n.startswith("data/"))
        place.plant(name, data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
        if not place.store.telling:
            assert "this store's ETags do not identify content" in run(place, "verify", place.address).stdout
        deep = () if place.store.telling else ("--deep",)
        assert name in run(place, "verify", place.address, *deep, check=3).stderr
        cells["verify"] = "yes, finds damage" if place.store.telling else "sizes; `--deep` finds damage"

    def test_objects_as_source(
        self, place: StorePlace, source: Path, expected: Listing, cells: dict[str, str], tmp_path: Path
    ) -> None:
        """Odd keys are read as the files that they are copies of, and one that changes is noticed."""
        for path in source.iterdir():
            place.plant(f"in/{path.name}", path.read_bytes())
        there = FolderPlace(tmp_path / "out")
        done = run(place, "build", f"{place.address}/in", there.address, "--json", *SHARDS)
        assert listing(there) == expected
        assert json.loads(done.stdout.splitlines()[-1])["written"] == 4
        cells["odd keys"] = "yes"

    def test_loaded_as_printed(self, place: StorePlace, source: Path, cells: dict[str, str], tmp_path: Path) -> None:
        """The line that a build prints runs as it is, with what it names installed."""
        reader = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}[place.store.scheme]
        if importlib.util.find_spec(reader) is None:
            cells["`datasets`"] = "not run"
            pytest.skip(f"{reader} is not installed: make test-stores")
        # Where the endpoint is said by an option, the line says it; where by the environment, that says it.
        known = {n: v for n, v in place.store.environment.items() if n in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST")}
        for name, endpoint in [("", ""), *known.items()]:
            environment = {n: v for n, v in place.environment.items() if n != name}
            there = StorePlace(place.store, place.folder, f"{place.prefix}/{bool(name)}")
            said = ("--endpoint-url", endpoint) if name else ()
            done = brim("build", source, there.address, *said, *SHARDS, env=environment)
            line = next(one.split(maxsplit=1)[1] for one in done.stdout.splitlines() if one.strip().startswith("load "))
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
    def keys(place: StorePlace) -> list[str]:
        store, obstore = place._client()
        return [one["path"][len(place.prefix) + 1 :] for page in obstore.list(store, place.prefix) for one in page]  # type: ignore[attr-defined]
