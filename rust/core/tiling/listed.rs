//! The tiles of pieces in a list: found by the edges of the grid that they form, or by a tree where they form none.

use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc};

use crate::{
    error::Result,
    region::Region,
    room::{self, Room as _},
    tiling::{
        Pieces, Poll,
        check::no_overlap,
        edges::Edges,
        tiles::{Finder, Held, Senders, Tiles},
        tree::Tree,
    },
};

/// The list that there may be no room for here.
const TILES: &str = "the tiles of a list";

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
    /// [`Error::BoxesOverlap`](crate::error::Error::BoxesOverlap) if two pieces share elements otherwise; [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory for the
    /// index; what `poll` returns.
    pub fn new(pieces: Arc<Pieces>, replicas: bool, poll: Poll<'_>) -> Result<Self> {
        let regions = pieces.regions();
        if u32::try_from(regions.len()).is_err() {
            return Err(room::none(format_args!("{} pieces in a list", regions.len())));
        }
        let mut filled = room::list(regions.len(), TILES)?;
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
        let mut tiles: Vec<(u32, u32)> = room::list(filled.len(), TILES)?; // first piece, and where its replicas begin in `filled`
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
        let (mut first, mut begins) = (room::list(tiles.len(), TILES)?, room::list(tiles.len() + 1, TILES)?);
        let mut all = room::list(filled.len(), TILES)?;
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

    /// True if there are none.
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

impl Tiles for Listed {
    fn count(&self) -> usize {
        self.first.len()
    }

    fn finder(&self) -> Box<dyn Finder + '_> {
        match &self.index {
            Index::Edges(edges) => Box::new(edges.finder()),
            Index::Tree(tree) => Box::new(tree.finder(self.pieces.regions(), &self.first)),
        }
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        Ok(Box::new(ListedSenders { tiles: self, loads: Vec::new(), heaps: Vec::new() }))
    }

    fn replicas(&self, tile: i64, _: usize) -> Result<Vec<i64>> {
        let held = self.held(tile);
        let mut all: Vec<i64> = room::list(held.len(), TILES)?;
        all.extend(held.iter().map(|&piece| self.pieces.owner(piece as usize).0));
        // A holder may have the box twice; they are in order.
        all.dedup();
        Ok(all)
    }

    fn held_by(&self, tile: i64, holder: i64) -> Option<Held> {
        // The pieces are in the order of their holders.
        let range = self.pieces.of_holder(holder as usize);
        let held = self.held(tile);
        let at = held.partition_point(|&piece| (piece as usize) < range.start);
        held.get(at).filter(|&&piece| range.contains(&(piece as usize))).map(|&piece| self.as_held(piece))
    }
}

/// The senders of listed tiles: the replica that has sent least, whichever of its tiles that was; the first of equals.
struct ListedSenders<'a> {
    tiles: &'a Listed,
    /// The elements that each holder has sent.
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
            let what = "the loads of the holders";
            self.heaps.room(self.tiles.len(), what)?;
            self.loads = room::filled(0, self.tiles.pieces.holders(), what)?;
            self.heaps.resize_with(self.tiles.len(), BinaryHeap::new);
        }
        let heap = &mut self.heaps[tile as usize];
        if heap.is_empty() {
            heap.room(held.len(), "the replicas")?;
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
