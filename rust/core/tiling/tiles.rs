//! The different boxes of a tiling, found by position.
//!
//! A *tile* is a box that one holder holds, or several replicas. For a plan each tiling says which tiles lie under a box,
//! and which of a tile's replicas is to send next: in closed form for the shards of a partition and the chunks of a grid,
//! and for boxes in a list by the edges of the grid that they form, or by a tree where they form none.

use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc};

use crate::{
    error::{Error, Result},
    index::linear::Linear,
    layout::AxisRole,
    partition::Partition,
    radix,
    region::Region,
    tiling::{Pieces, Poll, STEPS_PER_POLL, balance::Balance, check::no_overlap, edges::Edges, grid::Grid, tree::Tree},
    uneven::Cut,
};

/// The tiles of one tiling.
pub trait Tiles: Send + Sync {
    /// How many partial sums make one value: the holders of a tile's different addends hold the same box.
    fn addends(&self) -> usize {
        1
    }

    /// To find the tiles under boxes, one box after another.
    fn finder(&self) -> Box<dyn Finder + '_>;

    /// To choose who sends.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for what the holders have sent.
    fn senders(&self) -> Result<Box<dyn Senders + '_>>;

    /// The piece in which `holder` holds the tile, if it does.
    fn held_by(&self, tile: i64, holder: i64) -> Option<Held>;
}

impl<T: Tiles + ?Sized> Tiles for &T {
    fn addends(&self) -> usize {
        (**self).addends()
    }

    fn finder(&self) -> Box<dyn Finder + '_> {
        (**self).finder()
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        (**self).senders()
    }

    fn held_by(&self, tile: i64, holder: i64) -> Option<Held> {
        (**self).held_by(tile, holder)
    }
}

/// Finds the tiles under boxes. It remembers what the last one needed: neighbours cost less.
pub trait Finder {
    /// Shows `visit` the tiles that share elements with a box that is not empty, and what each has in common with it, in
    /// the order of the tiles' numbers.
    ///
    /// # Errors
    /// What `visit` returns.
    fn under(&mut self, region: Region<'_>, visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>) -> Result<()>;
}

/// Chooses who sends, so that the load is spread over the replicas.
pub trait Senders {
    /// Who sends the next `volume` elements of an addend of a tile.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for the loads.
    fn next(&mut self, tile: i64, addend: usize, volume: i64) -> Result<Held>;
}

/// A tile as a piece of one of its holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The holder.
    pub holder: i64,
    /// The piece's number among the holder's.
    pub piece: i64,
    /// Which of the addends it is.
    pub addend: i64,
}

/// Where the tiles of a grid meet a box along one dim: the index of the tile, start and stop of what is common.
pub(crate) type Common = (i64, i64, i64);

/// The cells of a grid under one box, walked in row-major order.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    /// The common parts of all dims, one dim after the other.
    common: Vec<Common>,
    /// Where each dim's begin, and the position in each.
    begins: Vec<usize>,
    at: Vec<usize>,
    row: Vec<i64>,
}

impl Cells {
    /// Walks the cells whose common parts along each dim `find` lists; `strides` gives their numbers.
    pub(crate) fn walk(
        &mut self,
        region: Region<'_>,
        strides: &[i64],
        mut find: impl FnMut(usize, i64, i64, &mut Vec<Common>),
        visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>,
    ) -> Result<()> {
        let rank = region.rank();
        self.common.clear();
        self.begins.clear();
        self.at.clear();
        self.row.resize(2 * rank, 0);
        let mut number = 0;
        for (dim, (start, stop)) in region.sides().enumerate() {
            let begin = self.common.len();
            find(dim, start, stop, &mut self.common);
            let Some(&(index, start, stop)) = self.common.get(begin) else { return Ok(()) };
            self.begins.push(begin);
            self.at.push(begin);
            (self.row[dim], self.row[rank + dim]) = (start, stop);
            number += index * strides[dim];
        }
        self.begins.push(self.common.len());
        loop {
            visit(number, Region::of_row(&self.row))?;
            let mut dim = rank;
            loop {
                if dim == 0 {
                    return Ok(());
                }
                dim -= 1;
                number -= self.common[self.at[dim]].0 * strides[dim];
                self.at[dim] += 1;
                let carried = self.at[dim] == self.begins[dim + 1];
                if carried {
                    self.at[dim] = self.begins[dim];
                }
                let (index, start, stop) = self.common[self.at[dim]];
                number += index * strides[dim];
                (self.row[dim], self.row[rank + dim]) = (start, stop);
                if !carried {
                    break;
                }
            }
        }
    }
}

/// Appends what `[start, stop)` has in common with the intervals of a cut, in order. Each step asks for the owner of the
/// next position, so empty shards in between, of which there may be many, cost nothing.
pub(crate) fn under_cut(cut: &Cut, start: i64, stop: i64, common: &mut Vec<Common>) {
    let mut at = start;
    while at < stop {
        let owner = cut.owner(at);
        let end = cut.bounds(owner).1.min(stop);
        common.push((owner, at, end));
        at = end;
    }
}

/// The cells of cuts, each dim's own.
struct CutFinder<'a> {
    cuts: &'a [Cut],
    strides: Vec<i64>,
    cells: Cells,
}

impl Finder for CutFinder<'_> {
    fn under(&mut self, region: Region<'_>, visit: &mut dyn FnMut(i64, Region<'_>) -> Result<()>) -> Result<()> {
        let cuts = self.cuts;
        let find = |dim: usize, start, stop, common: &mut Vec<Common>| under_cut(&cuts[dim], start, stop, common);
        self.cells.walk(region, &self.strides, find, visit)
    }
}

/// The shards of a partition.
pub(crate) struct Shards<'a> {
    partition: &'a Partition,
    /// What each unreduced coordinate adds to the device index, in order; one 0 if nothing is unreduced.
    pub(crate) addends: Vec<i64>,
    /// A device's unreduced coordinate, as one number.
    addend: Linear,
    shard: Linear,
}

impl<'a> Shards<'a> {
    pub(crate) fn new(partition: &'a Partition) -> Result<Self> {
        Ok(Self {
            addends: addends(partition)?,
            addend: addend_function(partition),
            shard: partition.shard_id_function(),
            partition,
        })
    }

    /// The device index of the shard's canonical owner.
    fn canonical_owner(&self, shard: i64) -> i64 {
        let index = radix::unravel(shard, self.partition.layout().num_shards());
        index.into_iter().enumerate().map(|(dim, i)| device_part(self.partition, dim, i)).sum()
    }
}

impl Tiles for Shards<'_> {
    fn addends(&self) -> usize {
        self.addends.len()
    }

    fn finder(&self) -> Box<dyn Finder + '_> {
        let strides = self.partition.shard_strides().to_vec();
        Box::new(CutFinder { cuts: self.partition.cuts(), strides, cells: Cells::default() })
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        Ok(Box::new(ShardSenders { shards: self, balance: Balance::new(self.partition, self.addends.len()) }))
    }

    fn held_by(&self, tile: i64, holder: i64) -> Option<Held> {
        (self.shard.at(holder) == tile).then(|| Held { holder, piece: 0, addend: self.addend.at(holder) })
    }
}

struct ShardSenders<'a> {
    shards: &'a Shards<'a>,
    balance: Balance,
}

impl Senders for ShardSenders<'_> {
    fn next(&mut self, tile: i64, addend: usize, volume: i64) -> Result<Held> {
        let step = self.shards.addends[addend] + self.balance.replica(tile, addend, || volume)?;
        Ok(Held { holder: self.shards.canonical_owner(tile) + step, piece: 0, addend: addend as i64 })
    }
}

/// What the shard index along `dim` contributes to the device index, the axes that cut nothing being at 0.
pub(crate) fn device_part(partition: &Partition, dim: usize, index: i64) -> i64 {
    let mesh = partition.mesh();
    let mut rest = index;
    let minor_first = partition.layout().specs()[dim].iter().rev();
    minor_first
        .map(|&axis| {
            let digit = rest % mesh.sizes()[axis];
            rest /= mesh.sizes()[axis];
            digit * mesh.strides()[axis]
        })
        .sum()
}

/// The unreduced coordinate of a device, as one number.
pub(crate) fn addend_function(source: &Partition) -> Linear {
    let unreduced = source.layout().unreduced_axes();
    let sizes: Vec<_> = unreduced.iter().map(|&axis| source.mesh().sizes()[axis]).collect();
    let weights = radix::strides(&sizes);
    Linear::new(source.mesh().sizes(), |axis| unreduced.iter().position(|&a| a == axis).map_or(0, |i| weights[i]))
}

/// What each unreduced coordinate adds to the device index, in order; one 0 if nothing is unreduced.
pub(crate) fn addends(source: &Partition) -> Result<Vec<i64>> {
    let mesh = source.mesh();
    let mut all = vec![0];
    for (axis, role) in source.layout().roles().iter().enumerate() {
        if *role == AxisRole::Unreduced {
            let (size, stride) = (mesh.sizes()[axis], mesh.strides()[axis]);
            let mut more = Vec::new();
            let count = usize::try_from(size).ok().and_then(|size| size.checked_mul(all.len()));
            if count.is_none_or(|count| more.try_reserve_exact(count).is_err()) {
                return Err(Error::TooMany { what: format!("{size} times {} addends", all.len()) });
            }
            more.extend(all.iter().flat_map(|&base| (0..size).map(move |c| base + c * stride)));
            all = more;
        }
    }
    Ok(all)
}

/// The chunks of a grid, each held by the holder of its number.
pub(crate) struct Chunks<'a> {
    grid: &'a Grid,
}

impl<'a> Chunks<'a> {
    pub(crate) fn new(grid: &'a Grid) -> Self {
        Self { grid }
    }
}

impl Tiles for Chunks<'_> {
    fn finder(&self) -> Box<dyn Finder + '_> {
        let strides = radix::strides(self.grid.counts());
        Box::new(CutFinder { cuts: self.grid.cuts(), strides, cells: Cells::default() })
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        Ok(Box::new(Own))
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

/// The tiles of pieces in a list.
#[derive(Debug)]
pub struct Listed {
    pieces: Arc<Pieces>,
    /// For each tile, a piece that is it.
    first: Vec<u32>,
    /// If there are replicas, where each tile's begin in `all`, and all pieces tile by tile.
    replicas: Option<(Vec<u32>, Vec<u32>)>,
    index: Index,
}

#[derive(Debug)]
enum Index {
    Edges(Edges),
    Tree(Tree),
}

impl Listed {
    /// The tiles of `pieces`; `replicas` says whether pieces of the identical box are one tile.
    ///
    /// # Errors
    /// [`Error::BoxesOverlap`] if two pieces share elements otherwise; [`Error::TooMany`] if there is no memory for the
    /// index; what `poll` returns.
    pub fn new(pieces: Arc<Pieces>, replicas: bool, poll: Poll<'_>) -> Result<Self> {
        let regions = pieces.regions();
        if u32::try_from(regions.len()).is_err() {
            return Err(Error::TooMany { what: format!("{} pieces in a list", regions.len()) });
        }
        let mut filled = room(regions.len())?;
        filled.extend((0..regions.len()).filter(|&i| !regions.get(i).is_empty()).map(|i| i as u32));
        let tiles = if replicas { Self::grouped(&pieces, filled, poll)? } else { (filled, None) };
        let (first, replicas) = tiles;
        let index = match Edges::new(regions, &first, poll)? {
            Some(edges) => Index::Edges(edges),
            None => {
                let tree = Tree::new(regions, &first, poll)?;
                no_overlap(&pieces, &first, &tree, poll)?;
                Index::Tree(tree)
            }
        };
        Ok(Self { pieces, first, replicas, index })
    }

    /// The tiles that pieces of identical boxes make, in the order of their first pieces.
    #[expect(clippy::type_complexity, reason = "the fields of `Listed`")]
    fn grouped(
        pieces: &Pieces,
        mut filled: Vec<u32>,
        poll: Poll<'_>,
    ) -> Result<(Vec<u32>, Option<(Vec<u32>, Vec<u32>)>)> {
        let regions = pieces.regions();
        let row = |i: u32| {
            let region = regions.get(i as usize);
            (region.start(), region.stop())
        };
        poll()?;
        filled.sort_unstable_by(|&a, &b| row(a).cmp(&row(b)).then(a.cmp(&b)));
        poll()?;
        let same = |a: u32, b: u32| row(a) == row(b);
        let mut tiles: Vec<(u32, u32)> = room(filled.len())?; // first piece, and where its replicas begin in `filled`
        for (at, &piece) in filled.iter().enumerate() {
            if at == 0 || !same(filled[at - 1], piece) {
                tiles.push((piece, at as u32));
            }
        }
        if tiles.len() == filled.len() {
            filled.sort_unstable();
            return Ok((filled, None));
        }
        tiles.sort_unstable();
        let (mut first, mut begins) = (room(tiles.len())?, room(tiles.len() + 1)?);
        let mut all = room(filled.len())?;
        begins.push(0);
        for &(piece, at) in &tiles {
            first.push(piece);
            all.extend(filled[at as usize..].iter().copied().take_while(|&other| same(piece, other)));
            begins.push(all.len() as u32);
        }
        Ok((first, Some((begins, all))))
    }

    /// The number of tiles.
    #[must_use]
    pub fn len(&self) -> usize {
        self.first.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_empty()
    }

    /// The boxes of all tiles.
    pub(crate) fn regions(&self) -> impl Iterator<Item = Region<'_>> + Clone {
        self.first.iter().map(|&piece| self.pieces.regions().get(piece as usize))
    }

    /// The pieces of a tile.
    fn held(&self, tile: i64) -> &[u32] {
        let tile = tile as usize;
        match &self.replicas {
            None => &self.first[tile..=tile],
            Some((begins, all)) => &all[begins[tile] as usize..begins[tile + 1] as usize],
        }
    }

    fn as_held(&self, piece: u32) -> Held {
        let (holder, piece) = self.pieces.owner(piece as usize);
        Held { holder, piece, addend: 0 }
    }
}

fn room<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|_| Error::TooMany { what: format!("{count} tiles") })?;
    Ok(list)
}

impl Tiles for Listed {
    fn finder(&self) -> Box<dyn Finder + '_> {
        match &self.index {
            Index::Edges(edges) => Box::new(edges.finder()),
            Index::Tree(tree) => Box::new(tree.finder(self.pieces.regions(), &self.first)),
        }
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        Ok(Box::new(ListedSenders { tiles: self, loads: Vec::new(), heaps: Vec::new() }))
    }

    fn held_by(&self, tile: i64, holder: i64) -> Option<Held> {
        // The pieces are in the order of their holders.
        let range = self.pieces.of_holder(holder as usize);
        let held = self.held(tile);
        let at = held.partition_point(|&piece| (piece as usize) < range.start);
        held.get(at).filter(|&&piece| range.contains(&(piece as usize))).map(|&piece| self.as_held(piece))
    }
}

/// Of the replicas of a tile the one that has sent least, whichever of its tiles that was; the first of equals.
struct ListedSenders<'a> {
    tiles: &'a Listed,
    /// What each holder has sent.
    loads: Vec<i64>,
    /// For each tile, what each of its replicas had sent when it was looked at last: less than now, or as much.
    heaps: Vec<BinaryHeap<Reverse<(i64, u32)>>>,
}

impl Senders for ListedSenders<'_> {
    fn next(&mut self, tile: i64, _: usize, volume: i64) -> Result<Held> {
        let held = self.tiles.held(tile);
        if self.tiles.replicas.is_none() {
            return Ok(self.tiles.as_held(held[0]));
        }
        if self.loads.is_empty() {
            let too_many = |_| Error::TooMany { what: "the loads of the holders".to_owned() };
            self.loads.try_reserve_exact(self.tiles.pieces.holders()).map_err(too_many)?;
            self.loads.resize(self.tiles.pieces.holders(), 0);
            self.heaps.try_reserve_exact(self.tiles.len()).map_err(too_many)?;
            self.heaps.resize_with(self.tiles.len(), BinaryHeap::new);
        }
        let heap = &mut self.heaps[tile as usize];
        if heap.is_empty() {
            heap.try_reserve_exact(held.len()).map_err(|_| Error::TooMany { what: "the replicas".to_owned() })?;
            heap.extend(held.iter().map(|&piece| Reverse((0, piece))));
        }
        loop {
            let Some(mut least) = heap.peek_mut() else { return Ok(self.tiles.as_held(held[0])) };
            let Reverse((load, piece)) = *least;
            let chosen = self.tiles.as_held(piece);
            let now = &mut self.loads[chosen.holder as usize];
            if *now > load {
                *least = Reverse((*now, piece));
                continue;
            }
            *now = now.saturating_add(volume);
            *least = Reverse((*now, piece));
            return Ok(chosen);
        }
    }
}

/// Polls once in so many calls.
pub(crate) struct Ticker(usize);

impl Ticker {
    pub(crate) fn new() -> Self {
        Self(0)
    }

    pub(crate) fn tick(&mut self, poll: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.0 += 1;
        if self.0 % STEPS_PER_POLL == 0 { poll() } else { Ok(()) }
    }
}
