"""What the engines' own loaders make of tiny models, whose elements are numbers: the expected values of the rules.

Each module runs in an environment that has its engine, and writes `tests/data/families/*.json.gz`; see `models`.
"""
