//! A job in units of work, each small enough for one thread's buffers.
//!
//! A tensor's box is halved, along its outermost dim, until what must be read for it and what must be written fit in the
//! buffers. So a tile of row shards is rows, a tile of column shards is rows of all columns, and each piece's part of it
//! is one run of its file or nearly: every byte is read once and written once, in runs as long as the buffers allow.
//! Pieces that have nothing in a half are not looked at again, so tiles of a tensor in 10⁵ pieces cost no more than
//! others. Tiles of small tensors share a unit, and so their reads and writes.

use shardwise_core::region::{Region, RegionBuf};

use crate::{
    error::{Error, Result, no_room},
    job::{Destination, Job, Source},
    pair::{Fetch, dense_strides, dim_to_split, groups},
    piece::Tensor,
};

/// Tiles in a unit, and calls that it takes, at most: what is known of a unit is memory too.
const MAX_TILES: usize = 1024;
const MAX_CALLS: i64 = 16 * 1024;

/// A box of a tensor, and the pieces that have to do with it.
#[derive(Debug)]
pub(crate) struct Tile {
    pub(crate) tensor: usize,
    pub(crate) bounds: RegionBuf,
    pub(crate) sources: Vec<u32>,
    pub(crate) destinations: Vec<u32>,
}

/// The smallest amount of work that is taken and finished: the destinations' parts of tiles.
#[derive(Debug)]
pub(crate) struct Unit {
    /// Bytes of destinations.
    pub(crate) bytes: i64,
    pub(crate) tiles: Vec<Tile>,
}

/// The units of a job, in order.
pub(crate) struct Units<'a> {
    job: &'a Job,
    /// Bytes of each of a thread's two buffers.
    limit: i64,
    next: usize,
    stack: Vec<Tile>,
    batch: Vec<Tile>,
    cost: Cost,
}

/// The cost of a tile, or of a batch of them.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    /// Bytes to read into a buffer.
    read: i64,
    /// Bytes to write from a buffer.
    write: i64,
    /// Bytes of destinations.
    bytes: i64,
    calls: i64,
}

impl Cost {
    fn and(self, other: Self) -> Self {
        Self {
            read: self.read.saturating_add(other.read),
            write: self.write.saturating_add(other.write),
            bytes: self.bytes.saturating_add(other.bytes),
            calls: self.calls.saturating_add(other.calls),
        }
    }
}

impl<'a> Units<'a> {
    pub(crate) fn new(job: &'a Job, limit: i64) -> Self {
        Self { job, limit, next: 0, stack: Vec::new(), batch: Vec::new(), cost: Cost::default() }
    }

    /// The next unit; none if there are no more.
    pub(crate) fn next(&mut self) -> Result<Option<Unit>> {
        loop {
            let Some(tile) = self.take()? else {
                return Ok(self.flush());
            };
            let tensor = &self.job.tensors[tile.tensor];
            let cost = self.cost_of(tensor, &tile);
            if !self.fits(cost) && tile.bounds.region().volume() > 1 {
                self.split(tensor, tile)?;
                continue;
            }
            let full = !self.batch.is_empty() && (!self.fits(self.cost.and(cost)) || self.batch.len() >= MAX_TILES);
            let unit = if full { self.flush() } else { None };
            self.batch.push(tile);
            self.cost = self.cost.and(cost);
            if unit.is_some() {
                return Ok(unit);
            }
        }
    }

    fn fits(&self, cost: Cost) -> bool {
        cost.read <= self.limit && cost.write <= self.limit && cost.bytes <= 4 * self.limit && cost.calls <= MAX_CALLS
    }

    /// The batch as a unit, if there is one.
    fn flush(&mut self) -> Option<Unit> {
        if self.batch.is_empty() {
            return None;
        }
        let bytes = std::mem::take(&mut self.cost).bytes;
        Some(Unit { bytes, tiles: std::mem::take(&mut self.batch) })
    }

    /// The next box to look at, no larger than what its destinations hold of it.
    fn take(&mut self) -> Result<Option<Tile>> {
        loop {
            let mut tile = match self.stack.pop() {
                Some(tile) => tile,
                None => {
                    let Some(tensor) = self.job.tensors.get(self.next) else { return Ok(None) };
                    self.next += 1;
                    whole(tensor, self.next - 1)?
                }
            };
            let tensor = &self.job.tensors[tile.tensor];
            let mut held: Option<RegionBuf> = None;
            tile.destinations.retain(|&index| {
                let piece = tensor.destinations.get(index as usize);
                let Some(part) = tile.bounds.region().overlap(piece.region) else { return false };
                match &mut held {
                    Some(held) => held.include(part.region()),
                    None => held = Some(part),
                }
                true
            });
            let Some(held) = held else { continue };
            tile.bounds = held;
            tile.sources.retain(|&index| tile.bounds.region().meets(tensor.sources.regions().get(index as usize)));
            return Ok(Some(tile));
        }
    }

    /// The cost of a tile; a limit that is passed is counted no further.
    fn cost_of(&self, tensor: &Tensor, tile: &Tile) -> Cost {
        let mut cost = Cost::default();
        let mut slots = Vec::with_capacity(tile.destinations.len());
        for &d in &tile.destinations {
            let piece = tensor.destinations.get(d as usize);
            let Some(bounds) = tile.bounds.region().overlap(piece.region) else { continue };
            let volume = bounds.region().volume();
            cost.bytes += volume;
            let strides = match self.job.destinations[piece.holder] {
                Destination::Memory(_) => piece.strides.to_vec(),
                _ => dense_strides(piece.strides, bounds.region()),
            };
            match self.job.destinations[piece.holder] {
                Destination::Memory(_) => {}
                Destination::Nowhere => cost.write += volume,
                Destination::File { .. } | Destination::Compared(_) => {
                    cost.write += volume;
                    cost.calls += Fetch::new(&piece, bounds.region(), &strides, 0, true).blocks();
                }
            }
            slots.push((bounds, strides));
            if !self.fits(cost) {
                return cost;
            }
        }
        for &s in &tile.sources {
            let piece = tensor.sources.get(s as usize);
            if matches!(self.job.sources[piece.holder], Source::Memory(_)) {
                continue;
            }
            let (parts, strides): (Vec<_>, Vec<_>) = slots
                .iter()
                .filter_map(|(slot, strides)| Some((slot.region().overlap(piece.region)?, strides)))
                .unzip();
            let (mut span, mut bytes) = ((i64::MAX, 0), 0_i64);
            for group in groups(&piece, &parts) {
                let bounds = group.bounds.region();
                let fetch = if group.together {
                    cost.read = cost.read.saturating_add(bounds.volume());
                    Fetch::new(&piece, bounds, &dense_strides(piece.strides, bounds), self.limit, true)
                } else {
                    Fetch::new(&piece, bounds, strides[group.parts[0]], self.limit, parts.len() == 1)
                };
                cost.calls += fetch.blocks();
                if fetch.cramped {
                    // In halves it is read in blocks, instead of run by run.
                    cost.read = i64::MAX;
                    return cost;
                }
                if !fetch.direct {
                    bytes = bytes.saturating_add(fetch.block.saturating_mul(fetch.blocks()));
                    span = (span.0.min(fetch.span.0), span.1.max(fetch.span.1));
                }
            }
            cost.read = cost.read.saturating_add(bytes.min((span.1.saturating_sub(span.0)).max(0)));
            if !self.fits(cost) {
                return cost;
            }
        }
        cost
    }

    /// Puts both halves of a tile on the stack, the first one to be taken first.
    fn split(&mut self, tensor: &Tensor, tile: Tile) -> Result<()> {
        let to = tensor.destinations.get(tile.destinations[0] as usize);
        let from = tile.sources.first().map(|&s| tensor.sources.get(s as usize));
        let bounds = tile.bounds.region();
        let dim = dim_to_split(tensor, bounds, from.as_ref(), &to);
        let middle = bounds.start()[dim] + bounds.extent(dim) / 2;
        let [first, second] = tile.bounds.split(dim, middle);
        let sources = copied(&tile.sources)?;
        let destinations = copied(&tile.destinations)?;
        self.stack.push(Tile { tensor: tile.tensor, bounds: second, sources, destinations });
        self.stack.push(Tile { bounds: first, ..tile });
        Ok(())
    }
}

/// The whole of a tensor, with all its pieces.
fn whole(tensor: &Tensor, number: usize) -> Result<Tile> {
    let all = |count: usize| {
        let count = u32::try_from(count).map_err(no_room(LIST))?;
        let mut indices = Vec::new();
        indices.try_reserve_exact(count as usize).map_err(no_room(LIST))?;
        indices.extend(0..count);
        Ok::<_, Error>(indices)
    };
    Ok(Tile {
        tensor: number,
        bounds: Region::new(&vec![0; tensor.shape.len()], &tensor.shape).to_buf(),
        sources: all(tensor.sources.len())?,
        destinations: all(tensor.destinations.len())?,
    })
}

fn copied(indices: &[u32]) -> Result<Vec<u32>> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(indices.len()).map_err(no_room(LIST))?;
    copy.extend_from_slice(indices);
    Ok(copy)
}

/// The list that there may be no memory for here.
const LIST: &str = "the list of pieces";
