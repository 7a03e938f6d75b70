#!/bin/sh
# wheel.sh BIN: what was installed from the wheel packages, verifies and gives back the sample, and is typed.
set -eu
bin=$1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$bin/brim" --version
"$bin/brim" doctor --json >/dev/null
"$bin/brim" build examples/sample/scans "$out/built" --quiet
"$bin/brim" verify "$out/built" examples/sample/scans --quiet
"$bin/brim" unpack "$out/built" "$out/files" --quiet
diff -r "$out/files" examples/sample/scans
"$bin/brim" recipes >/dev/null
"$bin/python" -c 'import brim, pathlib; assert (pathlib.Path(brim.__file__).parent / "py.typed").is_file()'
echo "the wheel works"
