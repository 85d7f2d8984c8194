#!/bin/sh
# The same with shardwise. Run: shardwise.sh model.safetensors WORK
set -e
rules=$(dirname "$0")/rules.toml
shardwise reshard "$1" "$2/for-4" --rules "$rules" --mesh tp=4
shardwise reshard "$2/for-4" "$2/for-8" --rules "$rules" --mesh tp=8
shardwise reshard "$2/for-8" "$2/merged.safetensors"
shardwise verify "$2/for-8"
shardwise diff "$1" "$2/merged.safetensors"
