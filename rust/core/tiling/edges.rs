//! Boxes that lie in a grid: found by their edges, dim by dim.

use crate::{
    error::Result,
    index::radix,
    region::{Region, Regions},
    room::{self, Room as _},
    tiling::{
        Poll,
        cells::{Cells, Common, UNDER},
        tiles::{Finder, Ticker},
    },
};

/// The list that there may be no room for here.
const EDGES: &str = "the edges of the boxes";

/// The most cells for each box; the others are empty.
const CELLS_PER_BOX: usize = 4;
/// No tile lies in the cell.
const NONE: u32 = u32::MAX;

/// The grid in whose cells tiles lie, one at most in each.
#[derive(Debug)]
pub(super) struct Edges {
    /// For each dim, where a tile starts or stops.
    edges: Vec<Vec<i64>>,
    /// Row-major strides of the cells.
    strides: Vec<i64>,
    /// The tile in each cell; empty if each tile lies in the cell of its number.
    tiles: Vec<u32>,
}

impl Edges {
    /// The grid of the boxes `tiles` of `regions`, none of which is empty; `None` if they lie in no grid, or two in one
    /// cell.
    pub(super) fn new(regions: &Regions, tiles: &[u32], poll: Poll<'_>) -> Result<Option<Self>> {
        let rank = regions.rank();
        let most = tiles.len().saturating_mul(CELLS_PER_BOX).saturating_add(64);
        let mut edges = Vec::with_capacity(rank);
        let mut cells = 1_usize;
        for dim in 0..rank {
            poll()?;
            let mut all: Vec<i64> = Vec::new();
            all.room(tiles.len().saturating_mul(2), EDGES)?;
            for side in [Region::start, Region::stop] {
                for &tile in tiles {
                    let at = side(regions.get(tile as usize))[dim];
                    if all.last() != Some(&at) {
                        all.push(at);
                    }
                }
            }
            all.sort_unstable();
            all.dedup();
            cells = cells.saturating_mul(all.len().saturating_sub(1));
            if cells > most {
                return Ok(None);
            }
            all.shrink_to_fit();
            edges.push(all);
        }
        let counts: Vec<i64> = edges.iter().map(|edges| edges.len() as i64 - 1).collect();
        let strides = radix::strides(&counts);
        let mut in_cell: Vec<u32> = room::filled(NONE, cells, EDGES)?;
        let mut hints = vec![0; rank];
        let mut ticker = Ticker::new();
        let mut in_order = cells == tiles.len();
        for (number, &tile) in tiles.iter().enumerate() {
            ticker.tick(poll)?;
            let mut cell = 0;
            for (dim, (start, stop)) in regions.get(tile as usize).sides().enumerate() {
                let at = position(&edges[dim], start, &mut hints[dim]);
                if edges[dim].get(at + 1) != Some(&stop) {
                    return Ok(None);
                }
                cell += at as i64 * strides[dim];
            }
            let slot = &mut in_cell[cell as usize];
            if *slot != NONE {
                return Ok(None);
            }
            *slot = number as u32;
            in_order &= cell as usize == number;
        }
        Ok(Some(Self { edges, strides, tiles: if in_order { Vec::new() } else { in_cell } }))
    }

    pub(super) fn finder(&self) -> EdgeFinder<'_> {
        EdgeFinder {
            grid: self,
            hints: vec![0; self.edges.len()],
            cells: Cells::default(),
            found: Vec::new(),
            rows: Vec::new(),
        }
    }
}

/// The last edge that is not after `at`, which is not before the first: at the place of the last answer or the one after
/// it, mostly.
fn position(edges: &[i64], at: i64, hint: &mut usize) -> usize {
    for guess in [*hint, *hint + 1] {
        if edges.get(guess).is_some_and(|&edge| edge <= at) && edges.get(guess + 1).is_none_or(|&edge| at < edge) {
            *hint = guess;
            return guess;
        }
    }
    *hint = edges.partition_point(|&edge| edge <= at) - 1;
    *hint
}

pub(super) struct EdgeFinder<'a> {
    grid: &'a Edges,
    hints: Vec<usize>,
    cells: Cells,
    /// The tiles found, each with where its common part is in `rows`.
    found: Vec<(u32, usize)>,
    rows: Vec<i64>,
}

impl Finder for EdgeFinder<'_> {
    fn under(&mut self, region: Region<'_>, visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>) -> Result<()> {
        let Self { grid, hints, cells, found, rows } = self;
        if grid.edges.iter().any(Vec::is_empty) {
            return Ok(());
        }
        let find = |dim: usize, start: i64, stop: i64, common: &mut Vec<Common>| {
            let edges = &grid.edges[dim];
            // Before the first edge and after the last there is no tile.
            let mut from = start.max(edges[0]);
            if from >= stop {
                return Ok(());
            }
            let first = position(edges, from, &mut hints[dim]);
            common.room(edges[first + 1..].partition_point(|&edge| edge < stop) + 1, UNDER)?;
            for (step, edge) in edges[first + 1..].iter().enumerate() {
                if from >= stop {
                    break;
                }
                common.push(((first + step) as i64, from, stop.min(*edge)));
                from = *edge;
            }
            Ok(())
        };
        if grid.tiles.is_empty() {
            return cells.walk(region, &grid.strides, find, visit);
        }
        // Some cells are empty, or the tiles are in another order than the cells.
        found.clear();
        rows.clear();
        cells.walk(region, &grid.strides, find, &mut |cell, common| {
            let tile = grid.tiles[cell as usize];
            if tile != NONE {
                found.room(1, UNDER)?;
                rows.room(2 * common.rank(), UNDER)?;
                found.push((tile, rows.len()));
                rows.extend_from_slice(common.start());
                rows.extend_from_slice(common.stop());
            }
            Ok(())
        })?;
        found.sort_unstable();
        found
            .iter()
            .try_for_each(|&(tile, at)| visit(i64::from(tile), Region::of_row(&rows[at..at + 2 * region.rank()])))
    }
}
