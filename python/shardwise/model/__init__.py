"""Models and variables built under a layout map.

| module | answers |
|---|---|
| `scope` | `layout_map_scope`: where variables find their layouts |
| `variable` | variables that wait for their layout |
| `hooks` | the parts of frameworks, registered by themselves |
"""
