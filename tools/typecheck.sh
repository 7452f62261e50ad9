#!/bin/sh
# mypy cannot see that kernels/, kvcache/, quant/, cli/ and configs/ install inside genai/: show it a tree of links.
set -eu
cd "$(dirname "$0")/.."
tree=build/typecheck
rm -rf "$tree"
mkdir -p "$tree/genai"
for path in genai/*; do
    case "$path" in */__pycache__) ;; *) ln -s "$PWD/$path" "$tree/$path" ;; esac
done
for room in cli configs kernels kvcache quant; do ln -s "$PWD/$room" "$tree/genai/$room"; done
cd "$tree"
exec "${PYTHON:-python3}" -m mypy --config-file ../../pyproject.toml --strict "$@" genai
