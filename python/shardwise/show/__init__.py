"""Pictures of tilings and plans.

| module | answers |
|---|---|
| `picture` | the model of a picture |
| `views`, `cells`, `boxes`, `lanes` | pictures of meshes, layouts, tilings, plans |
| `svg`, `html`, `text`, `terminal` | the same picture drawn in four ways |
| `canvas` | a drawing as elements of SVG |
| `draw` | `shardwise.draw` |
| `table`, `names`, `lines`, `colours`, `fit` | tables; names in short; lines; colours; room for text |
"""
