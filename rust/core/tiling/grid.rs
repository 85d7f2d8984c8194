//! A regular grid of chunks, each a holder of its own: the chunks of a zarr array.

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    index::radix,
    layout::Layout,
    mesh::Mesh,
    partition::Partition,
    region::{Region, sides},
    tiling::{
        Piece, Pieces, Place, Poll, Tiling,
        cells::CutFinder,
        checked_holder, checked_shape, pieces_one_by_one,
        tiles::{Finder, Held, Senders, Tiles},
    },
    uneven::Cut,
};

/// Chunks of one shape, the first at the tensor's corner, numbered in C order; those at the far ends hold what is left.
///
/// ```
/// use shardwise_core::tiling::{Tiling, grid::Grid};
/// let grid = Grid::new(&[10, 6], &[4, 6], false)?;
/// assert_eq!((grid.holders(), grid.array_shape(2)?), (3, vec![2, 6]));
/// assert_eq!(Grid::new(&[10, 6], &[4, 6], true)?.array_shape(2)?, [4, 6]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grid {
    shape: Vec<i64>,
    chunks: Vec<i64>,
    padded: bool,
    cuts: Vec<Cut>,
    counts: Vec<i64>,
    holders: i64,
}

impl Grid {
    /// The grid of a tensor of `shape` in chunks of the shape `chunks`. If `padded`, the arrays of the chunks at the far
    /// ends have that shape too, as those of zarr have, and their elements beyond the tensor mean nothing.
    ///
    /// # Errors
    /// [`Error::Rank`] if the two differ in rank, [`Error::NegativeDim`], [`Error::ChunkSize`] for a chunk below one
    /// element, [`Error::Overflow`] if the elements of the tensor or of a chunk, or the chunks, are over 2^63 - 1.
    pub fn new(shape: &[i64], chunks: &[i64], padded: bool) -> Result<Self> {
        checked_shape(shape)?;
        if chunks.len() != shape.len() {
            return Err(Error::Chunks { given: chunks.len(), rank: shape.len() });
        }
        if let Some((dim, &size)) = chunks.iter().enumerate().find(|&(_, &size)| size < 1) {
            return Err(Error::ChunkSize { dim, size });
        }
        radix::product("chunks", chunks)?;
        let cuts: Vec<Cut> = shape.iter().zip(chunks).map(|(&n, &chunk)| Cut::in_chunks(n, chunk)).collect();
        let counts: Vec<i64> = cuts.iter().map(Cut::shards).collect();
        let holders = radix::product("the number of chunks", &counts)?;
        Ok(Self { shape: shape.to_vec(), chunks: chunks.to_vec(), padded, cuts, counts, holders })
    }

    /// The grid whose chunks the `count` boxes of `bounds`, (boxes, dims, 2) in C order, are, all of them in their order;
    /// `None` if they are those of no grid.
    pub(super) fn of_bounds(shape: &[i64], count: usize, bounds: &[i64]) -> Option<Self> {
        let row = 2 * shape.len();
        let first = sides(bounds.get(..row)?);
        let chunks: Option<Vec<i64>> = first.map(|(start, stop)| (start == 0).then_some(stop)).collect();
        let chunks = chunks?;
        let grid = Self::new(shape, &chunks, false).ok()?;
        if i64::try_from(count) != Ok(grid.holders) || count.checked_mul(row) != Some(bounds.len()) {
            return None;
        }
        let mut at = vec![0_i64; shape.len()];
        for bounds in bounds.chunks_exact(row.max(1)) {
            let mut carries = true;
            for (((side, at), &chunk), &n) in sides(bounds).zip(&mut at).zip(&grid.chunks).zip(shape).rev() {
                let stop = n.min(at.saturating_add(chunk));
                if side != (*at, stop) {
                    return None;
                }
                if carries {
                    carries = stop == n;
                    *at = if carries { 0 } else { stop };
                }
            }
        }
        Some(grid)
    }

    /// The number of chunks along each dim.
    #[must_use]
    pub fn counts(&self) -> &[i64] {
        &self.counts
    }

    fn bounds(&self, holder: i64) -> Result<(Vec<i64>, Vec<i64>)> {
        let index = radix::unravel(checked_holder(holder, self.holders)?, &self.counts);
        Ok(self.cuts.iter().zip(index).map(|(cut, i)| cut.bounds(i)).unzip())
    }
}

impl Tiling for Grid {
    fn shape(&self) -> &[i64] {
        &self.shape
    }

    fn holders(&self) -> i64 {
        self.holders
    }

    fn array_shape(&self, holder: i64) -> Result<Vec<i64>> {
        let (start, stop) = self.bounds(holder)?;
        Ok(if self.padded { self.chunks.clone() } else { Region::new(&start, &stop).extents().collect() })
    }

    fn visit_pieces(&self, holder: i64, visit: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        let (start, stop) = self.bounds(holder)?;
        let origin = vec![0; start.len()];
        visit(Piece { region: Region::new(&start, &stop), place: Place::At(&origin) })
    }

    fn has_replicas(&self) -> bool {
        false
    }

    fn chunks(&self) -> Option<&[i64]> {
        Some(&self.chunks)
    }

    fn check(&self, _: Poll<'_>) -> Result<()> {
        Ok(())
    }

    fn tiles(&self, _: Poll<'_>) -> Result<Box<dyn Tiles + '_>> {
        Ok(Box::new(Chunks { grid: self }))
    }

    fn pieces(&self, poll: Poll<'_>) -> Result<Arc<Pieces>> {
        match Arc::new(self.clone()).as_partition() {
            Some(partition) => partition.pieces(poll), // all at once
            None => pieces_one_by_one(self, poll),
        }
    }

    /// Over a mesh with an axis for each dim; a grid without chunks, or without dims, is left as it is.
    fn as_partition(self: Arc<Self>) -> Option<Arc<Partition>> {
        let names: Vec<[String; 1]> = (0..self.shape.len()).map(|dim| [dim.to_string()]).collect();
        let mesh = Mesh::new(names.as_flattened(), &self.counts).ok()?;
        let layout = Layout::new(Arc::new(mesh), &names, &[]).ok()?;
        Partition::of_cuts(Arc::new(layout), &self.shape, &self.cuts).ok().map(Arc::new)
    }
}

/// The chunks of a grid, each held by the holder of its number.
struct Chunks<'a> {
    grid: &'a Grid,
}

impl Tiles for Chunks<'_> {
    fn count(&self) -> usize {
        usize::try_from(self.grid.holders).unwrap_or(usize::MAX)
    }

    fn finder(&self) -> Box<dyn Finder + '_> {
        Box::new(CutFinder::new(&self.grid.cuts, radix::strides(&self.grid.counts)))
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        Ok(Box::new(Own))
    }

    fn replicas(&self, tile: i64, _: usize) -> Result<Vec<i64>> {
        Ok(vec![tile])
    }

    fn held_by(&self, tile: i64, holder: i64) -> Option<Held> {
        (tile == holder).then_some(Held { holder, piece: 0, addend: 0 })
    }
}

/// Each tile is sent by the holder of its number.
struct Own;

impl Senders for Own {
    fn next(&mut self, tile: i64, _: usize, _: i64) -> Result<Held> {
        Ok(Held { holder: tile, piece: 0, addend: 0 })
    }
}
